"""Episode ring buffer on the device: init, begin, add, draw, gather (spec 4.6-4.10).

A slot holds one episode of up to T+1 rows. Row k is the observation o_k with the
action, reward and termination flag that led to it; row 0 has zeros for those three.
Every environment writes into a slot of its own; an episode that ends closes its
slot, and its environment takes the next slot in ring order, whose old episode is
forgotten at that moment; row 0 is written when the next episode begins. A window is
H+1 consecutive rows of one episode, so it cannot cross an episode, a write head or a
reset.

All functions are pure and have static shapes. Inside a jitted scan whose carry is
donated the rows are written in place; read only the newest state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from mjx_tdmpc2.types import Batch


@struct.dataclass
class ReplayState:
  """The buffer.

  Attributes:
    rows: f32[slots, T+1, S+A+2] observation, action that led to it, reward,
      termination flag.
    length: i32[slots] rows of the slot's episode written so far; 0 where the slot
      was never used.
    published: bool[slots] the slot's episode had closed before the newest `add`
      began. Only these may be drawn with insertion "episode".
    slot: i32[n] the slot that each environment writes into.
    row: i32[n] the row that each environment wrote last.
    cursor: i32[] the slot that is next in ring order.
  """

  rows: jax.Array
  length: jax.Array
  published: jax.Array
  slot: jax.Array
  row: jax.Array
  cursor: jax.Array


class Transition(NamedTuple):
  """What one vector step gives to the buffer.

  last_obs: f32[n, S], the true observation after the step, before any reset;
  action: f32[n, A]; reward: f32[n]; terminated: bool[n]; done: bool[n], the
  episode ended (termination or time limit); bad: bool[n], the physics state was
  not finite: the row is not stored, and the episode ends before it.
  """

  last_obs: jax.Array
  action: jax.Array
  reward: jax.Array
  terminated: jax.Array
  done: jax.Array
  bad: jax.Array


def init(
  num_envs: int,
  slots: int,
  episode_length: int,
  obs_size: int,
  action_size: int,
) -> ReplayState:
  """An empty buffer; `begin` puts the first observations into it.

  Args:
    num_envs: n.
    slots: episodes held; at least 2n, so that a free slot is always found.
    episode_length: T, the most transitions of one episode.
    obs_size: S.
    action_size: A.

  Raises:
    ValueError: fewer than 2n slots.
  """
  if slots < 2 * num_envs:
    raise ValueError(
      f"The replay buffer got {slots} slots for {num_envs} environments; it needs"
      f" at least {2 * num_envs}, two for each environment."
    )
  width = obs_size + action_size + 2
  slot = jnp.arange(num_envs, dtype=jnp.int32)
  return ReplayState(
    rows=jnp.zeros((slots, episode_length + 1, width), jnp.float32),
    length=jnp.zeros((slots,), jnp.int32).at[slot].set(1),
    published=jnp.zeros((slots,), bool),
    slot=slot,
    row=jnp.zeros((num_envs,), jnp.int32),
    cursor=jnp.asarray(num_envs % slots, jnp.int32),
  )


def begin(state: ReplayState, first_obs: jax.Array, begun: jax.Array) -> ReplayState:
  """Stores the first observations of episodes.

  Args:
    state: the buffer.
    first_obs: f32[n, S]; read only where `begun`.
    begun: bool[n] the environment has just begun an episode.
  """
  slots, _, width = state.rows.shape
  nowhere = slots + jnp.arange(begun.size, dtype=jnp.int32)
  rows = state.rows.at[jnp.where(begun, state.slot, nowhere), 0].set(
    _first_rows(first_obs, width), mode="drop", unique_indices=True
  )
  return state.replace(rows=rows)


def add(state: ReplayState, transition: Transition) -> ReplayState:
  """Stores one vector step and takes a slot for the next episode where one ended.

  An episode that this call closes is published by the next call: in the reference
  a finished episode enters the buffer at the start of the following iteration, so
  the update after its last step does not see it (spec 4.C).

  Args:
    state: the buffer.
    transition: the vector step.
  """
  slots, rows_per_slot, _ = state.rows.shape
  num_envs = state.slot.shape[0]
  ended = transition.done | transition.bad
  published = state.published | ((state.length > 0) & ~_running(state))

  # Rows that are not to be written get indices beyond the buffer, each its own.
  nowhere = slots + jnp.arange(num_envs, dtype=jnp.int32)
  row = state.row + 1
  stored = ~transition.bad & (row < rows_per_slot)
  rows = state.rows.at[jnp.where(stored, state.slot, nowhere), row].set(
    _packed_rows(transition), mode="drop", unique_indices=True
  )
  row = jnp.where(stored, row, state.row)
  length = state.length.at[state.slot].set(row + 1, unique_indices=True)

  fresh, cursor = _next_slots(state, ended)
  fresh_or_nowhere = jnp.where(ended, fresh, nowhere)
  write = {"mode": "drop", "unique_indices": True}
  return ReplayState(
    rows=rows,
    length=length.at[fresh_or_nowhere].set(1, **write),
    published=published.at[fresh_or_nowhere].set(False, **write),
    slot=jnp.where(ended, fresh, state.slot),
    row=jnp.where(ended, 0, row),
    cursor=cursor,
  )


def window_table(state: ReplayState, horizon: int, insertion: str) -> jax.Array:
  """Cumulative counts of the legal windows, i32[slots]; the last one is the total.

  Args:
    state: the buffer.
    horizon: H; a window has H+1 rows.
    insertion: "step": windows of every episode, running ones included; "episode":
      of published episodes only.
  """
  count = jnp.maximum(state.length - horizon, 0)
  if insertion == "episode":
    count = jnp.where(state.published, count, 0)
  elif insertion != "step":
    raise ValueError(f'insertion must be "step" or "episode", got {insertion!r}.')
  return jnp.cumsum(count, dtype=jnp.int32)


def draw_windows(
  key: jax.Array, table: jax.Array, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
  """Draws windows uniformly, with replacement, among all that are legal.

  Args:
    key: consumed.
    table: i32[slots] from `window_table`.
    shape: of the result. With no legal window every index is in range and
      meaningless: the caller checks `num_windows` first.

  Returns:
    slot, start: i32[shape] each; the window is rows start ... start+H of the slot.
  """
  ticket = jax.random.randint(key, shape, 0, jnp.maximum(table[-1], 1))
  slot = jnp.searchsorted(table, ticket, side="right", method="scan_unrolled")
  slot = jnp.minimum(slot, table.shape[0] - 1).astype(jnp.int32)
  before = jnp.where(slot > 0, table[jnp.maximum(slot - 1, 0)], 0)
  return slot, ticket - before


def gather(
  state: ReplayState,
  slot: jax.Array,
  start: jax.Array,
  horizon: int,
  obs_size: int,
  action_size: int,
) -> Batch:
  """Reads windows as a time-major batch (spec 2.1).

  Args:
    state: the buffer.
    slot: i32[B] from `draw_windows`.
    start: i32[B] from `draw_windows`.
    horizon: H.
    obs_size: S.
    action_size: A.
  """
  time = start + jnp.arange(horizon + 1, dtype=jnp.int32)[:, None]
  window = state.rows.at[slot[None, :], time].get(mode="clip")
  end = obs_size + action_size
  return Batch(
    obs=window[:, :, :obs_size],
    action=window[1:, :, obs_size:end],
    reward=window[1:, :, end],
    terminated=window[1:, :, end + 1],
  )


def num_windows(table: jax.Array) -> jax.Array:
  """Legal windows of a `window_table`, i32[]."""
  return table[-1]


def num_transitions(state: ReplayState) -> jax.Array:
  """Transitions held, those of running episodes included, i32[]."""
  return jnp.sum(jnp.maximum(state.length - 1, 0), dtype=jnp.int32)


def num_episodes(state: ReplayState) -> jax.Array:
  """Closed episodes held, published or not, i32[]."""
  return jnp.sum((state.length > 0) & ~_running(state), dtype=jnp.int32)


def _running(state: ReplayState) -> jax.Array:
  """bool[slots]: an environment writes into the slot."""
  return jnp.zeros(state.length.shape, bool).at[state.slot].set(True)


def _next_slots(
  state: ReplayState, ended: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The k-th environment that ends gets the k-th free slot in ring order.

  The slots of episodes that run, or end in this very step, are not free.

  Returns:
    slot: i32[n], meaningful where `ended`; cursor: i32[] behind the last one taken.
  """
  slots = state.length.shape[0]
  ring = (state.cursor + jnp.arange(slots, dtype=jnp.int32)) % slots
  free = jnp.cumsum(~_running(state)[ring], dtype=jnp.int32)
  rank = jnp.cumsum(ended, dtype=jnp.int32)
  place = jnp.searchsorted(free, rank, side="left", method="scan_unrolled")
  taken = jnp.where(rank[-1] > 0, place[-1] + 1, 0).astype(jnp.int32)
  return ring[place], (state.cursor + taken) % slots


def _packed_rows(transition: Transition) -> jax.Array:
  """f32[n, S+A+2] rows of a vector step."""
  return jnp.concatenate(
    [
      transition.last_obs,
      transition.action,
      transition.reward[:, None],
      transition.terminated[:, None],
    ],
    axis=1,
    dtype=jnp.float32,
  )


def _first_rows(reset_obs: jax.Array, width: int) -> jax.Array:
  """f32[n, width] rows that begin an episode."""
  pad = width - reset_obs.shape[1]
  return jnp.pad(reset_obs.astype(jnp.float32), ((0, 0), (0, pad)))
