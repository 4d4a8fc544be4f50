"""Batched MPPI planner: model-predictive path integral control in latent space.

A decision refines a Gaussian over action sequences for `iterations` rounds (spec 3,
Eq. 6): sample candidates, value each one by rolling out the world model and
bootstrapping from the Q ensemble, refit the Gaussian to the best of them. It then
executes the first action of one elite.

`draw_plan` makes every random number of a decision and `plan_core` is the
deterministic rest, both for one environment. `plan` runs them for many, a chunk of
`cfg.plan_chunk` environments at a time, so that the chunk bounds the memory.

Work that does not change the result is left out: only the two drawn Q heads are
evaluated, the trajectories of the policy prior are rolled out once a decision, and
`plan_model` evaluates the world model with less work for each candidate.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mjx_tdmpc2 import plan_model, world_model
from mjx_tdmpc2.config import AgentConfig
from mjx_tdmpc2.plan_model import PlanModel
from mjx_tdmpc2.world_model import Params


class PlanDraws(NamedTuple):
  """Every random number of one decision of one environment.

  pi_eps: f32[H, P, A] normal noise of the policy trajectories.
  noise: f32[I, H, N-P, A] normal noise of the Gaussian candidates.
  terminal_pi_eps: f32[I, N, A] normal noise of the terminal policy actions.
  q_pair: i32[I, 2] two distinct Q heads for each iteration.
  u: f32[] uniform in [0, 1) that draws the executed elite.
  action_noise: f32[A] normal exploration noise.
  dropout: key of the terminal Q pass's dropout, or None for no dropout.
  """

  pi_eps: jax.Array
  noise: jax.Array
  terminal_pi_eps: jax.Array
  q_pair: jax.Array
  u: jax.Array
  action_noise: jax.Array
  dropout: jax.Array | None


class PlanInfo(NamedTuple):
  """What a decision went through; costs nothing where it is not used.

  iter_values: f32[I, N] values of all candidates in each iteration.
  iter_actions_last: f32[H, N, A] candidates of the last iteration.
  elite: i32[] index of the executed elite, in descending order of value.
  """

  iter_values: jax.Array
  iter_actions_last: jax.Array
  elite: jax.Array


class _Rollout(NamedTuple):
  """Action sequences rolled out from one latent.

  actions: f32[H, n, A]; value: f32[n] sum of discounted rewards; z: f32[n, L] last
  latents; alive: f32[n], 0 where termination was predicted on the way, else 1.
  """

  actions: jax.Array
  value: jax.Array
  z: jax.Array
  alive: jax.Array


class _Gaussian(NamedTuple):
  """The sampling distribution: mean and std, f32[H, A] each."""

  mean: jax.Array
  std: jax.Array


def draw_plan(cfg: AgentConfig, key: jax.Array) -> PlanDraws:
  """Draws the random numbers of one decision."""
  key_normal, key_uniform, key_dropout = jax.random.split(key, 3)
  horizon, action_size, iterations = cfg.horizon, cfg.action_size, cfg.iterations
  num_pi, num_gaussian = cfg.num_pi_trajs, cfg.num_samples - cfg.num_pi_trajs
  # Two flat draws, cut up: each call of the generator costs time and compile time.
  pi_eps, noise, terminal_pi_eps, action_noise = _cut(
      functools.partial(jax.random.normal, key_normal),
      (horizon, num_pi, action_size),
      (iterations, horizon, num_gaussian, action_size),
      (iterations, cfg.num_samples, action_size),
      (action_size,),
  )
  (first, offset), u = _cut(
      functools.partial(jax.random.uniform, key_uniform), (2, iterations), ()
  )
  first = (first * cfg.num_q).astype(jnp.int32)
  offset = 1 + (offset * (cfg.num_q - 1)).astype(jnp.int32)
  has_dropout = cfg.q_dropout_form == "paper" and cfg.dropout > 0.0
  return PlanDraws(
      pi_eps=pi_eps,
      noise=noise,
      terminal_pi_eps=terminal_pi_eps,
      q_pair=jnp.stack([first, (first + offset) % cfg.num_q], axis=-1),
      u=u,
      action_noise=action_noise,
      dropout=key_dropout if has_dropout else None,
  )


def _cut(draw: Callable, *shapes: tuple[int, ...]) -> list[jax.Array]:
  """Arrays of the given shapes out of one flat draw."""
  sizes = [math.prod(shape) for shape in shapes]
  parts = jnp.split(draw((sum(sizes),)), list(itertools.accumulate(sizes))[:-1])
  return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def act(
    cfg: AgentConfig,
    params: Params,
    prev_mean: jax.Array,
    obs: jax.Array,
    t0: jax.Array,
    key: jax.Array,
    eval_mode: bool,
    task: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Chooses actions by planning, or from the policy prior if not `cfg.mpc`.

  The policy prior acts by a sample, in `eval_mode` by tanh(μ), and leaves
  `prev_mean` as it is (spec 3.4). Arguments and results are those of `plan`.
  """
  if cfg.mpc:
    return plan(cfg, params, prev_mean, obs, t0, key, eval_mode, task)
  params = world_model.renorm_task_emb(params, task)
  z = world_model.encode(cfg, params, obs, task)
  eps = jax.random.normal(key, (obs.shape[0], cfg.action_size))
  prior = world_model.pi(cfg, params, z, eps, task)
  return (prior.mean if eval_mode else prior.action), prev_mean


def plan(
    cfg: AgentConfig,
    params: Params,
    prev_mean: jax.Array,
    obs: jax.Array,
    t0: jax.Array,
    key: jax.Array,
    eval_mode: bool,
    task: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Plans one action for each of B environments (spec 3).

  Environment i draws from `fold_in(key, i)`, so its plan depends neither on the
  other environments nor, beyond rounding, on `cfg.plan_chunk`. (With an "rbg" key
  the draws do depend on the chunk: that generator is not invariant under vmap.)

  Args:
    cfg: agent config.
    params: world-model parameters. Look-ups use the renormed task embedding; to
      store it, as the reference does, is the caller's work.
    prev_mean: f32[B, H, A] means of the previous decisions.
    obs: f32[B, S] observations.
    t0: bool[B] environments that plan from zeros in place of `prev_mean`.
    key: PRNG key.
    eval_mode: static; leaves out the exploration noise.
    task: i32[B] task ids, or None with a single task.

  Returns:
    Actions f32[B, A] in [-1, 1] and means f32[B, H, A] for the next decision.
  """
  num_envs = obs.shape[0]
  chunk = min(cfg.plan_chunk or num_envs, num_envs)
  stack_heads = chunk > 1 or cfg.q_layout == "stacked"
  params = world_model.renorm_task_emb(params, task)
  model = plan_model.arrange(cfg, params, stack_heads)

  def plan_env(env):
    index, obs, mean, t0, task = env
    draws = draw_plan(cfg, jax.random.fold_in(key, index))
    action, mean, _ = _plan_one(cfg, model, obs, mean, t0, draws, eval_mode, task)
    return action, mean

  envs = (jnp.arange(num_envs), obs, prev_mean, t0, task)
  if chunk == 1:
    return lax.map(plan_env, envs)
  if chunk == num_envs:
    return jax.vmap(plan_env)(envs)
  return lax.map(plan_env, envs, batch_size=chunk)


def plan_core(
    cfg: AgentConfig,
    params: Params,
    obs: jax.Array,
    prev_mean: jax.Array,
    t0: jax.Array,
    draws: PlanDraws,
    eval_mode: bool,
    task: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, PlanInfo]:
  """One decision of one environment with given draws (spec 3.C).

  Args:
    cfg: agent config.
    params: world-model parameters.
    obs: f32[S] observation.
    prev_mean: f32[H, A] mean of the previous decision.
    t0: bool[] whether to plan from zeros.
    draws: the random numbers.
    eval_mode: static; leaves out the exploration noise.
    task: i32[] task id, or None with a single task.

  Returns:
    The action f32[A], the mean f32[H, A] for the next decision, a `PlanInfo`.
  """
  params = world_model.renorm_task_emb(params, task)
  model = plan_model.arrange(cfg, params, stack_heads=cfg.q_layout == "stacked")
  return _plan_one(cfg, model, obs, prev_mean, t0, draws, eval_mode, task)


def _plan_one(
    cfg: AgentConfig,
    model: PlanModel,
    obs: jax.Array,
    prev_mean: jax.Array,
    t0: jax.Array,
    draws: PlanDraws,
    eval_mode: bool,
    task: jax.Array | None,
) -> tuple[jax.Array, jax.Array, PlanInfo]:
  """`plan_core` with arranged parameters."""
  model = plan_model.for_task(model, task)
  mask = world_model.action_mask(cfg, task)
  mask = jnp.ones(cfg.action_size) if mask is None else mask
  z = plan_model.encode(cfg, model, obs[None], task)

  def prior_action(t, z):
    return world_model.pi(cfg, model.params, z, draws.pi_eps[t], task).action

  prior = _rollout(cfg, model, z, prior_action, task)

  def iterate(carry, drawn):
    gaussian = carry[0]
    noise, terminal_pi_eps, q_pair, dropout = drawn
    actions = gaussian.mean[:, None] + gaussian.std[:, None] * noise
    actions = jnp.clip(actions, -1.0, 1.0) * mask
    sampled = _rollout(cfg, model, z, lambda t, _: actions[t], task)
    candidates = _join(prior, sampled)
    values = _value(cfg, model, candidates, terminal_pi_eps, q_pair, dropout, task)
    elites, score = _elites(cfg, values, candidates.actions)
    gaussian = _refit(cfg, elites, score, mask)
    return (gaussian, elites, score, candidates.actions), values

  shifted = jnp.zeros_like(prev_mean).at[:-1].set(prev_mean[1:])
  carry = (
      _Gaussian(jnp.where(t0, 0.0, shifted), jnp.full_like(shifted, cfg.max_std)),
      jnp.zeros((cfg.horizon, cfg.num_elites, cfg.action_size)),
      jnp.zeros(cfg.num_elites),
      jnp.zeros((cfg.horizon, cfg.num_samples, cfg.action_size)),
  )
  dropout = draws.dropout
  if dropout is not None:
    dropout = jax.random.split(dropout, cfg.iterations)
  (gaussian, elites, score, actions), values = lax.scan(
      iterate, carry, (draws.noise, draws.terminal_pi_eps, draws.q_pair, dropout)
  )
  elite = _draw_elite(score, draws.u)
  action = elites[0, elite]
  if not eval_mode:
    action += gaussian.std[0] * draws.action_noise
  info = PlanInfo(iter_values=values, iter_actions_last=actions, elite=elite)
  return jnp.clip(action, -1.0, 1.0), gaussian.mean, info


def _rollout(
    cfg: AgentConfig,
    model: PlanModel,
    z: jax.Array,
    action_at: Callable[[int, jax.Array], jax.Array],
    task: jax.Array | None,
) -> _Rollout:
  """Rolls n action sequences out from one latent f32[1, L] (spec 3.10, 3.11).

  `action_at(t, z)` gives the actions f32[n, A] at step t, where z is f32[n, L], or
  f32[1, L] at step 0.
  """
  discounts = _discounts(cfg, task)
  value, alive, actions = 0.0, 1.0, []
  for t in range(cfg.horizon):
    action = action_at(t, z)
    actions.append(action)
    reward, next_z = plan_model.step(cfg, model, z, action)
    if cfg.uncertainty_coef:
      reward -= _uncertainty(cfg, model, z, action, task)
    value += discounts[t] * alive * reward
    z = next_z
    if cfg.episodic:
      logit = world_model.termination_logit(cfg, model.params, z)
      alive = alive * (jax.nn.sigmoid(logit) <= 0.5)
  return _Rollout(
      actions=jnp.stack(actions),
      value=value,
      z=z,
      alive=jnp.broadcast_to(alive, value.shape),
  )


def _join(prior: _Rollout, sampled: _Rollout) -> _Rollout:
  """All N candidates, policy trajectories first: in a tie, the first one wins."""
  return _Rollout(
      actions=jnp.concatenate([prior.actions, sampled.actions], axis=1),
      value=jnp.concatenate([prior.value, sampled.value]),
      z=jnp.concatenate([prior.z, sampled.z]),
      alive=jnp.concatenate([prior.alive, sampled.alive]),
  )


def _value(
    cfg: AgentConfig,
    model: PlanModel,
    candidates: _Rollout,
    pi_eps: jax.Array,
    q_pair: jax.Array,
    dropout: jax.Array | None,
    task: jax.Array | None,
) -> jax.Array:
  """Values f32[N] of the candidates, bootstrap included; always finite (3.10, 3.15)."""
  params, z = model.params, candidates.z
  action = world_model.pi(cfg, params, z, pi_eps, task).action
  terminal = world_model.q_pair(
      cfg, params["q"], params, z, action, q_pair, "avg", task, dropout
  )
  if cfg.uncertainty_coef:
    terminal -= _uncertainty(cfg, model, z, action, task)
  discount = _discounts(cfg, task)[-1]
  return jnp.nan_to_num(candidates.value + discount * candidates.alive * terminal)


def _uncertainty(
    cfg: AgentConfig,
    model: PlanModel,
    z: jax.Array,
    action: jax.Array,
    task: jax.Array | None,
) -> jax.Array:
  """Test-time penalty f32[n]: c · mean · std over all Q heads (Eq. 9-12, spec 3.26).

  The std is unbiased, which the paper leaves open, and the heads have no dropout.
  """
  z = jnp.broadcast_to(z, (action.shape[0], z.shape[-1]))
  logits = world_model.q_all(cfg, model.params["q"], model.params, z, action, task)
  q = world_model.decode(cfg, logits)
  return cfg.uncertainty_coef * jnp.mean(q, axis=0) * jnp.std(q, axis=0, ddof=1)


def _discounts(cfg: AgentConfig, task: jax.Array | None) -> list:
  """γ^0 ... γ^H: Python floats, float32 scalars of the task in multi-task (3.10)."""
  gamma = cfg.discounts[0] if task is None else world_model.discount(cfg, task)
  powers = [1.0]
  for _ in range(cfg.horizon):
    powers.append(powers[-1] * gamma)
  return powers


def _elites(
    cfg: AgentConfig, values: jax.Array, actions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Best candidates f32[H, E, A], best first, and their scores f32[E] (3.15, 3.16)."""
  best, index = lax.top_k(values, cfg.num_elites)
  score = jnp.exp(cfg.temperature * (best - best[0]))
  return actions[:, index], score / jnp.sum(score)


def _refit(
    cfg: AgentConfig, elites: jax.Array, score: jax.Array, mask: jax.Array
) -> _Gaussian:
  """The Gaussian of the scored elites; std around the new mean (spec 3.17)."""
  weight = score[:, None]
  total = jnp.sum(score) + 1e-9
  mean = jnp.sum(weight * elites, axis=1) / total
  variance = jnp.sum(weight * jnp.square(elites - mean[:, None]), axis=1) / total
  std = jnp.clip(jnp.sqrt(variance), cfg.min_std, cfg.max_std)
  return _Gaussian(mean=mean * mask, std=std * mask)


def _draw_elite(score: jax.Array, u: jax.Array) -> jax.Array:
  """Index i32[] drawn with probabilities `score` by inverse CDF (spec 3.19)."""
  cdf = jnp.cumsum(score)
  index = jnp.searchsorted(cdf / cdf[-1], u, side="right")
  return jnp.minimum(index, score.shape[0] - 1).astype(jnp.int32)
