"""The training loop's carry and its jitted entry point.

`train_chunk` repeats `train_iteration` (begin episodes → act → step → store → learn)
a traced number of times in one compiled loop with a donated state. Seed phase, burst
and training are the same program with other numbers, a `Phase`: compiling physics and
updates is what a start costs, so each is compiled once. Every random number is a
function of the run's key and of two counters in the state, so neither the chunk
lengths nor an interruption change a result.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from envs_mjx.base import Env
from envs_mjx.wrappers import BatchEnv
from mjx_tdmpc2 import planner, replay
from mjx_tdmpc2.config import Resolved
from mjx_tdmpc2.update import LearnerState, draw_update, init_learner, update

# Streams of random numbers, folded into the run's key.
_INIT_STREAM, _ACT_STREAM, _LEARN_STREAM, EVAL_STREAM = range(4)


class Phase(NamedTuple):
  """What one iteration of the training loop does; scalars, traced.

  Attributes:
    vector_steps: i32[] steps of all environments: 1, or 0 in the burst (spec 4.4).
    planning: bool[] act by the agent, else uniformly at random (spec 4.3).
    updates: i32[] updates of the learner after the steps.
  """

  vector_steps: jax.Array
  planning: jax.Array
  updates: jax.Array

  @classmethod
  def seed(cls) -> "Phase":
    """Random actions, no updates."""
    return cls(jnp.int32(1), jnp.bool_(False), jnp.int32(0))

  @classmethod
  def burst(cls, updates: int) -> "Phase":
    """Updates alone."""
    return cls(jnp.int32(0), jnp.bool_(False), jnp.int32(updates))

  @classmethod
  def train(cls, updates: int) -> "Phase":
    """One planned vector step, then updates."""
    return cls(jnp.int32(1), jnp.bool_(True), jnp.int32(updates))


@struct.dataclass
class Metrics:
  """Sums since the last log row, reduced on the device.

  Attributes:
    updates: i32[] updates summed in `losses`.
    losses: dict of f32[]: sums of the update's scalars.
    episodes: i32[] episodes that ended (bad ones not counted).
    episode_return: f32[] sum of their returns.
    bad_env_resets: i32[] environments reset because a state was not finite.
    contact_overflow: i32[] physics substeps with more contacts than slots.
  """

  updates: jax.Array
  losses: dict[str, jax.Array]
  episodes: jax.Array
  episode_return: jax.Array
  bad_env_resets: jax.Array
  contact_overflow: jax.Array


@struct.dataclass
class TrainState:
  """Everything that a run carries from one vector step to the next.

  Attributes:
    learner: parameters, targets, optimisers, Q scale, update count.
    env: state of the batch of environments.
    plan_mean: f32[n, H, A] the planner's last mean of every environment.
    t0: bool[n] the environment is at the start of an episode, or never planned.
    replay: the episode ring buffer.
    metrics: sums since the last log row.
    key: the run's key; never changes.
    vector_steps: i32[] vector steps done.
  """

  learner: LearnerState
  env: Any
  plan_mean: jax.Array
  t0: jax.Array
  replay: replay.ReplayState
  metrics: Metrics
  key: jax.Array
  vector_steps: jax.Array


class Trainer:
  """Pure functions over `TrainState` for one resolved configuration.

  Attributes:
    traces: how often each entry point was traced; a test's evidence that it was
      compiled once.
  """

  def __init__(self, config: Resolved, env: Env):
    self.config = config
    self.agent = config.agent
    self.batch_env = BatchEnv(
      env, config.num_envs, reset_batch=config.reset_batch, stagger=config.stagger
    )
    self.traces = {"init": 0, "train_chunk": 0}
    self.init = jax.jit(self._init)
    self.train_chunk = jax.jit(self._train_chunk, donate_argnums=0)

  # Entry points.

  def _init(self, key: jax.Array) -> TrainState:
    """State of a run before its first episode, from the run's key."""
    self.traces["init"] += 1
    config, agent = self.config, self.agent
    key_learner, key_env = jax.random.split(jax.random.fold_in(key, _INIT_STREAM))
    return TrainState(
      learner=init_learner(agent, key_learner),
      env=self.batch_env.initial(key_env),
      plan_mean=jnp.zeros((config.num_envs, agent.horizon, agent.action_size)),
      t0=jnp.ones(config.num_envs, bool),
      replay=replay.init(
        num_envs=config.num_envs,
        slots=config.slots,
        episode_length=config.episode_length,
        obs_size=agent.obs_size,
        action_size=agent.action_size,
      ),
      metrics=self.zero_metrics(),
      key=key,
      vector_steps=jnp.int32(0),
    )

  def _train_chunk(
    self, state: TrainState, iterations: jax.Array, phase: Phase
  ) -> TrainState:
    """Runs `iterations` i32[] iterations of a phase; `state` is donated."""
    self.traces["train_chunk"] += 1
    return jax.lax.fori_loop(
      0, iterations, lambda _, s: self.train_iteration(s, phase), state
    )

  # Phases.

  def train_iteration(self, state: TrainState, phase: Phase) -> TrainState:
    """One vector step, n transitions, unless in the burst; then the updates."""

    def collect(_, state):
      state = self.begin_episodes(state)
      action, state = self.act(state, phase.planning)
      return self.step_and_store(state, action)

    # A loop of one step or none: unlike a `cond` it works on the buffer in place.
    state = jax.lax.fori_loop(0, phase.vector_steps, collect, state)
    return self.learn(state, phase.updates)

  def begin_episodes(self, state: TrainState) -> TrainState:
    """Resets the environments whose episode is over and stores where they begin."""
    begun = state.env.ended
    with jax.named_scope("reset"):
      env = self.batch_env.begin(state.env)
      buffer = replay.begin(state.replay, env.obs, begun)
    return state.replace(env=env, replay=buffer)

  def act(
    self, state: TrainState, planning: jax.Array
  ) -> tuple[jax.Array, TrainState]:
    """Actions f32[n, A] from the agent, or uniform in [-1, 1] (spec 4.3)."""
    agent = self.agent
    key = jax.random.fold_in(
      jax.random.fold_in(state.key, _ACT_STREAM), state.vector_steps
    )

    def agent_actions(_):
      with jax.default_matmul_precision(self.config.matmul_precision):
        action, mean = planner.act(
          agent,
          state.learner.params,
          state.plan_mean,
          state.env.obs,
          state.t0,
          key,
          eval_mode=False,
        )
      # An environment plans from zeros until it has planned in this episode.
      return action, mean, jnp.zeros_like(state.t0)

    def random_actions(_):
      shape = (self.config.num_envs, agent.action_size)
      action = jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)
      return action, state.plan_mean, state.t0

    with jax.named_scope("act"):
      action, mean, t0 = jax.lax.cond(planning, agent_actions, random_actions, None)
    return action, state.replace(plan_mean=mean, t0=t0)

  def step_and_store(self, state: TrainState, action: jax.Array) -> TrainState:
    """Steps the environments and stores what happened."""
    with jax.named_scope("environment"):
      env, transition = self.batch_env.advance(state.env, action)
    with jax.named_scope("store"):
      buffer = replay.add(
        state.replay,
        replay.Transition(
          last_obs=transition.last_obs,
          action=action,
          reward=transition.reward,
          terminated=transition.terminated,
          done=transition.done,
          bad=transition.bad,
        ),
      )
    good_end = transition.done & ~transition.bad
    metrics = state.metrics
    metrics = metrics.replace(
      episodes=metrics.episodes + good_end.sum(dtype=jnp.int32),
      episode_return=metrics.episode_return
      + jnp.where(good_end, transition.episode_return, 0.0).sum(),
      bad_env_resets=metrics.bad_env_resets + transition.bad.sum(dtype=jnp.int32),
      contact_overflow=metrics.contact_overflow
      + transition.contact_overflow.sum(dtype=jnp.int32),
    )
    return state.replace(
      env=env,
      replay=buffer,
      t0=state.t0 | transition.done,
      metrics=metrics,
      vector_steps=state.vector_steps + 1,
    )

  def learn(self, state: TrainState, num_updates: jax.Array) -> TrainState:
    """`num_updates` updates; the buffer does not change between them."""
    agent, config = self.agent, self.config
    buffer = state.replay
    stream = jax.random.fold_in(state.key, _LEARN_STREAM)
    with jax.named_scope("window_table"):
      table = replay.window_table(buffer, agent.horizon, config.insertion)

    def body(_, carry):
      learner, sums = carry
      key = jax.random.fold_in(stream, learner.updates)
      key_windows, key_draws = jax.random.split(key)
      with jax.named_scope("sample"):
        slot, start = replay.draw_windows(key_windows, table, (agent.batch_size,))
        batch = replay.gather(
          buffer, slot, start, agent.horizon, agent.obs_size, agent.action_size
        )
      with (
        jax.named_scope("update"),
        jax.default_matmul_precision(config.matmul_precision),
      ):
        draws = draw_update(agent, key_draws, agent.batch_size)
        learner, info = update(agent, learner, batch, draws)
      return learner, jax.tree.map(jnp.add, sums, info)

    learner, losses = jax.lax.fori_loop(
      0, num_updates, body, (state.learner, state.metrics.losses)
    )
    metrics = state.metrics.replace(
      losses=losses, updates=state.metrics.updates + num_updates
    )
    return state.replace(learner=learner, metrics=metrics)

  # Metrics.

  def zero_metrics(self) -> Metrics:
    """Empty sums, with an entry for every scalar that an update reports."""
    return Metrics(
      updates=jnp.int32(0),
      losses={name: jnp.float32(0) for name in self.loss_names()},
      episodes=jnp.int32(0),
      episode_return=jnp.float32(0),
      bad_env_resets=jnp.int32(0),
      contact_overflow=jnp.int32(0),
    )

  def loss_names(self) -> tuple[str, ...]:
    """Names of the scalars that an update reports."""
    agent = self.agent

    def one_update(key):
      learner = init_learner(agent, key)
      rows = (agent.horizon, agent.batch_size)
      batch = replay.Batch(
        obs=jnp.zeros((rows[0] + 1, rows[1], agent.obs_size)),
        action=jnp.zeros((*rows, agent.action_size)),
        reward=jnp.zeros(rows),
        terminated=jnp.zeros(rows),
      )
      return update(agent, learner, batch, draw_update(agent, key, rows[1]))[1]

    return tuple(jax.eval_shape(one_update, jax.random.key(0)))
