"""Batched evaluation: whole episodes, planned without exploration noise (spec 4.21).

Evaluation has environments, planner state and random numbers of its own, so a
run with and without it trains identically.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from envs_mjx.base import Env, EnvState
from mjx_tdmpc2 import planner
from mjx_tdmpc2.config import Resolved
from mjx_tdmpc2.training import EVAL_STREAM


@struct.dataclass
class EvalState:
  """E episodes under way.

  Attributes:
    env: EnvState with leading axis E; zeros until the first piece begins.
    reset_keys: [E] keys of the initial states.
    plan_mean: f32[E, H, A].
    t0: bool[E] no decision was made in this episode yet.
    active: bool[E] the episode has not ended.
    bad: bool[E] the episode ended because a state was not finite.
    episode_return: f32[E].
    step: i32[] agent steps done.
    key: key of this evaluation.
  """

  env: EnvState
  reset_keys: jax.Array
  plan_mean: jax.Array
  t0: jax.Array
  active: jax.Array
  bad: jax.Array
  episode_return: jax.Array
  step: jax.Array
  key: jax.Array


class EvalResult(NamedTuple):
  """Returns of the episodes of one evaluation."""

  episode_returns: np.ndarray
  bad_episodes: int

  def row(self) -> dict[str, float]:
    """The columns of `eval.csv` that summarise the returns."""
    returns = self.episode_returns
    return {
      "return_mean": float(returns.mean()),
      "return_std": float(returns.std()),
      "return_min": float(returns.min()),
      "return_max": float(returns.max()),
      "episodes": int(returns.size),
    }


class Evaluator:
  """Runs evaluations in pieces, so that a caller can show progress or stop.

  Attributes:
    traces: how often each entry point was traced.
  """

  def __init__(self, config: Resolved, env: Env):
    self.config = config
    self.env = env
    self.episodes = config.eval_episodes
    self.episode_length = config.episode_length
    self.traces = {"init": 0, "run": 0}
    self.init = jax.jit(self._init)
    self.run = jax.jit(self._run, donate_argnums=1)

  def _init(self, run_key: jax.Array, index: jax.Array) -> EvalState:
    """Evaluation `index` i32[] before it begins; the same in a resumed run."""
    self.traces["init"] += 1
    agent = self.config.agent
    key = jax.random.fold_in(jax.random.fold_in(run_key, EVAL_STREAM), index)
    key_reset, key_plan = jax.random.split(key)
    reset_keys = jax.random.split(key_reset, self.episodes)
    shape = jax.eval_shape(jax.vmap(self.env.reset), reset_keys)
    return EvalState(
      env=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape),
      reset_keys=reset_keys,
      plan_mean=jnp.zeros((self.episodes, agent.horizon, agent.action_size)),
      t0=jnp.ones(self.episodes, bool),
      active=jnp.ones(self.episodes, bool),
      bad=jnp.zeros(self.episodes, bool),
      episode_return=jnp.zeros(self.episodes),
      step=jnp.int32(0),
      key=key_plan,
    )

  def _run(self, params, state: EvalState, num_steps: jax.Array) -> EvalState:
    """Advances all episodes by `num_steps` i32[] agent steps."""
    self.traces["run"] += 1
    # The first piece begins the episodes: a loop of one turn or none.
    env = jax.lax.fori_loop(
      0,
      (state.step == 0).astype(jnp.int32),
      lambda _, env: jax.vmap(self.env.reset)(state.reset_keys),
      state.env,
    )
    state = state.replace(env=env)
    return jax.lax.fori_loop(0, num_steps, lambda _, s: self._step(params, s), state)

  def _step(self, params, state: EvalState) -> EvalState:
    key = jax.random.fold_in(state.key, state.step)
    with jax.default_matmul_precision(self.config.matmul_precision):
      action, mean = planner.act(
        self.config.agent,
        params,
        state.plan_mean,
        state.env.obs,
        state.t0,
        key,
        eval_mode=True,
      )
    env = jax.vmap(self.env.step)(state.env, action)
    finite = jnp.isfinite(env.reward) & jnp.isfinite(env.obs).all(axis=-1)
    reward = jnp.where(state.active & finite, env.reward, 0.0)
    ended = env.terminated | env.truncated
    return state.replace(
      env=env,
      plan_mean=mean,
      t0=jnp.zeros_like(state.t0),
      active=state.active & finite & ~ended,
      bad=state.bad | (state.active & ~finite),
      episode_return=state.episode_return + reward,
      step=state.step + 1,
    )

  def result(self, state: EvalState) -> EvalResult:
    """Returns of the episodes, fetched from the device."""
    return EvalResult(np.asarray(state.episode_return), int(state.bad.sum()))
