"""A batch of environments that resets what ended, at a cost in proportion.

`BatchEnv` vmaps an environment, hands on the true last observation of every episode
and resets the environments that ended. Resets are paid only in vector steps in which
an environment ends: the indices of those that ended are compacted and reset in chunks
by a loop that is not batched, so that it runs no iteration where none ended.

`reset` and `step` are what most callers want. They consist of `initial`, `begin` and
`advance`, which a training loop calls itself: with `begin` first in the loop's body,
the one compiled reset there makes the first episodes as well.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from envs_mjx.base import Env, EnvSpec, EnvState


@struct.dataclass
class BatchState:
  """State of n environments.

  Attributes:
    env: state of each, every leaf with a leading axis n.
    keys: [n] one PRNG key per environment; every reset consumes a new one of its own.
    ended: bool[n] the episode is over and the next one has not begun.
    time_limit: i32[n] agent steps after which the running episode is cut off.
    episode_return: f32[n] rewards so far in the running episode.
    episode_length: i32[n] agent steps so far in the running episode.
  """

  env: EnvState
  keys: jax.Array
  ended: jax.Array
  time_limit: jax.Array
  episode_return: jax.Array
  episode_length: jax.Array

  @property
  def obs(self) -> jax.Array:
    """f32[n, S] what to act on next; where `ended`, nothing to act on."""
    return self.env.obs


@struct.dataclass
class Transition:
  """What one vector step produced, before any reset.

  Attributes:
    last_obs: f32[n, S] the observation that the action led to, an episode's true last
      one where it ended; zeros where `bad`.
    reward: f32[n]; zero where `bad`.
    terminated: bool[n] the task ended: do not bootstrap.
    truncated: bool[n] the time limit was reached.
    done: bool[n] the episode is over for any reason, `bad` included.
    bad: bool[n] a state, observation or reward was NaN or infinite. The episode is
      over and the row must not be stored.
    episode_return: f32[n] return of the episode up to this step (final where `done`).
    episode_length: i32[n] agent steps of the episode up to this step, likewise.
    contact_overflow: i32[n] see `EnvState.contact_overflow`.
  """

  last_obs: jax.Array
  reward: jax.Array
  terminated: jax.Array
  truncated: jax.Array
  done: jax.Array
  bad: jax.Array
  episode_return: jax.Array
  episode_length: jax.Array
  contact_overflow: jax.Array


class BatchEnv:
  """n environments stepped together; pure functions, to be jitted by the caller."""

  def __init__(
    self,
    env: Env,
    num_envs: int,
    reset_batch: int | None = None,
    stagger: bool = False,
  ):
    """Wraps an environment.

    Args:
      env: the environment; pure `reset(key)` and `step(state, action)`.
      num_envs: n.
      reset_batch: environments that one iteration of the reset loop resets; None
        takes an eighth of n, rounded up. It changes speed, never results.
      stagger: cuts the first episode of environment i off after about (i + 1)·T/n
        steps, so that the environments do not all end in the same vector step.

    Raises:
      ValueError: `num_envs` or `reset_batch` is out of range.
    """
    if num_envs < 1:
      raise ValueError(f"num_envs must be 1 or more, got {num_envs}.")
    if reset_batch is None:
      reset_batch = math.ceil(num_envs / 8)
    if not 1 <= reset_batch <= num_envs:
      raise ValueError(
        f"reset_batch must lie between 1 and num_envs = {num_envs}, got {reset_batch}."
      )
    self.env = env
    self.num_envs = num_envs
    self.reset_batch = reset_batch
    self.stagger = stagger

  @property
  def spec(self) -> EnvSpec:
    """The single environment's description."""
    return self.env.spec

  def reset(self, key: jax.Array) -> BatchState:
    """Begins an episode in every environment.

    Args:
      key: consumed; each environment draws its episodes from a key of its own.
    """
    return self.begin(self.initial(key))

  def initial(self, key: jax.Array) -> BatchState:
    """The state before any episode, in which every environment waits for `begin`.

    Args:
      key: consumed; each environment draws its episodes from a key of its own.
    """
    n = self.num_envs
    keys = jax.random.split(key, n)
    shape = jax.eval_shape(jax.vmap(self.env.reset), keys)
    return BatchState(
      env=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape),
      keys=keys,
      ended=jnp.ones(n, bool),
      time_limit=self._first_time_limit(),
      episode_return=jnp.zeros(n, jnp.float32),
      episode_length=jnp.zeros(n, jnp.int32),
    )

  def step(
    self, state: BatchState, action: jax.Array
  ) -> tuple[BatchState, Transition]:
    """Steps every environment, then resets those whose episode is over.

    Args:
      state: of all environments.
      action: f32[n, A].

    Returns:
      The state to act on next, and the transition as it was before the resets.
    """
    state, transition = self.advance(state, action)
    return self.begin(state), transition

  def begin(self, state: BatchState) -> BatchState:
    """Begins an episode in every environment whose last one is over."""
    env, keys = self._reset_where(state.ended, state.env, state.keys)
    return state.replace(env=env, keys=keys, ended=jnp.zeros_like(state.ended))

  def advance(
    self, state: BatchState, action: jax.Array
  ) -> tuple[BatchState, Transition]:
    """Steps every environment; those whose episode is over wait for `begin`.

    Args:
      state: of all environments, none of them waiting.
      action: f32[n, A].
    """
    env = jax.vmap(self.env.step)(state.env, action)
    length = state.episode_length + 1
    bad = ~_all_finite((env.physics, env.obs, env.reward))
    truncated = (env.truncated | (length >= state.time_limit)) & ~bad
    terminated = env.terminated & ~bad
    done = truncated | terminated | bad
    reward = jnp.where(bad, 0.0, env.reward)
    episode_return = state.episode_return + reward
    transition = Transition(
      last_obs=jnp.where(bad[:, None], 0.0, env.obs),
      reward=reward,
      terminated=terminated,
      truncated=truncated,
      done=done,
      bad=bad,
      episode_return=episode_return,
      episode_length=length,
      contact_overflow=env.contact_overflow,
    )
    state = BatchState(
      env=env,
      keys=state.keys,
      ended=done,
      time_limit=jnp.where(done, self.spec.episode_length, state.time_limit),
      episode_return=jnp.where(done, 0.0, episode_return),
      episode_length=jnp.where(done, 0, length),
    )
    return state, transition

  def _first_time_limit(self) -> jax.Array:
    n, limit = self.num_envs, self.spec.episode_length
    if not self.stagger:
      return jnp.full(n, limit, jnp.int32)
    return jnp.array([math.ceil((i + 1) * limit / n) for i in range(n)], jnp.int32)

  def _reset_where(
    self, done: jax.Array, env: EnvState, keys: jax.Array
  ) -> tuple[EnvState, jax.Array]:
    """Resets the environments marked in bool[n], chunk by chunk; others keep theirs."""
    n, chunk = self.num_envs, self.reset_batch
    count = jnp.sum(done, dtype=jnp.int32)
    # Indices of those that ended, in order; n, which no scatter writes, elsewhere.
    padded = math.ceil(n / chunk) * chunk
    (ended,) = jnp.nonzero(done, size=padded, fill_value=n)

    def reset_chunk(carry):
      start, env, keys = carry
      index = jax.lax.dynamic_slice(ended, (start,), (chunk,))
      pairs = jax.vmap(jax.random.split)(keys[jnp.minimum(index, n - 1)])
      fresh = jax.vmap(self.env.reset)(pairs[:, 1])
      env, keys = jax.tree.map(
        lambda old, new: old.at[index].set(new, mode="drop"),
        (env, keys),
        (fresh, pairs[:, 0]),
      )
      return start + chunk, env, keys

    _, env, keys = jax.lax.while_loop(
      lambda carry: carry[0] < count, reset_chunk, (jnp.int32(0), env, keys)
    )
    return env, keys


def _all_finite(tree: Any) -> jax.Array:
  """Returns bool[n]: every float of every leaf [n, ...] is finite."""
  finite = [
    jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(axis=1)
    for leaf in jax.tree.leaves(tree)
    if jnp.issubdtype(leaf.dtype, jnp.inexact)
  ]
  return jnp.stack(finite).all(axis=0)
