"""TD target, world-model loss and policy loss, as pure functions (spec 2)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjx_tdmpc2 import math, world_model
from mjx_tdmpc2.config import AgentConfig
from mjx_tdmpc2.types import Batch

Info = dict[str, jax.Array]


class PolicyAux(NamedTuple):
  """By-products of the policy loss: the moved Q scale f32[], and scalars to log."""

  scale: jax.Array
  info: Info


def td_target(
    cfg: AgentConfig,
    params: world_model.Params,
    target_q,
    next_z: jax.Array,
    batch: Batch,
    eps: jax.Array,
    pair: jax.Array,
    dropout_key: jax.Array | None,
) -> jax.Array:
  """One-step targets r + γ(1 - terminated)·min of two target heads (spec 2.3).

  Args:
    cfg: agent config.
    params: parameters before the step.
    target_q: target heads.
    next_z: encoded next observations [H, B, L].
    batch: windows.
    eps: noise of the policy sample [H, B, A].
    pair: the two heads, i32[2].
    dropout_key: key for the dropout of the target heads, or None.

  Returns:
    Raw-space targets [H, B], without gradient.
  """
  action = world_model.pi(cfg, params, next_z, eps, batch.task).action
  value = world_model.q_pair(
      cfg, target_q, params, next_z, action, pair, "min", batch.task, dropout_key
  )
  gamma = world_model.discount(cfg, batch.task)
  target = batch.reward + gamma * (1.0 - batch.terminated) * value
  return jax.lax.stop_gradient(target)


def termination_f1(logits: jax.Array, terminated: jax.Array) -> jax.Array:
  """F1 score f32[] of "probability above one half" against flags [B] (spec 1.25)."""
  predicted = (logits > 0.0).astype(jnp.float32)
  hits = jnp.sum(predicted * terminated)
  precision = hits / (jnp.sum(predicted) + 1e-9)
  recall = hits / (jnp.sum(terminated) + 1e-9)
  return 2.0 * precision * recall / (precision + recall + 1e-9)


def model_loss(
    cfg: AgentConfig,
    params: world_model.Params,
    batch: Batch,
    next_z: jax.Array,
    target: jax.Array,
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array, Info]]:
  """World-model loss (Eq. 3 with the reference's normalisation, spec 2.4-2.8).

  Args:
    cfg: agent config.
    params: parameters to differentiate; `pi` may be absent.
    batch: windows.
    next_z: encoded next observations [H, B, L], held fixed.
    target: TD targets [H, B], held fixed.
    dropout_key: key for the dropout of the online heads, or None.

  Returns:
    Loss f32[], and (latents [H+1, B, L]: the encoded first one and the H
    predicted ones; scalars to log).
  """
  horizon, task = cfg.horizon, batch.task
  rho = cfg.rho ** jnp.arange(horizon, dtype=jnp.float32)
  two_hot = functools.partial(
      math.two_hot, vmin=cfg.vmin, vmax=cfg.vmax, num_bins=cfg.num_bins
  )

  zs = [world_model.encode(cfg, params, batch.obs[0], task)]
  for t in range(horizon):
    zs.append(world_model.next_latent(cfg, params, zs[t], batch.action[t], task))
  zs = jnp.stack(zs)
  error = jnp.mean(jnp.square(zs[1:] - next_z), axis=(1, 2))
  consistency = jnp.sum(rho * error) / horizon

  logits = world_model.reward_logits(cfg, params, zs[:-1], batch.action, task)
  reward_ce = math.soft_ce(logits, two_hot(batch.reward))
  reward = jnp.sum(rho * jnp.mean(reward_ce, axis=-1)) / horizon

  logits = world_model.q_all(
      cfg, params["q"], params, zs[:-1], batch.action, task, dropout_key
  )
  value_ce = math.soft_ce(logits, two_hot(target))
  value = jnp.sum(rho * jnp.mean(value_ce, axis=(0, 2))) / horizon

  loss = (
      cfg.consistency_coef * consistency
      + cfg.reward_coef * reward
      + cfg.value_coef * value
  )
  info = {
      "consistency_loss": consistency,
      "reward_loss": reward,
      "value_loss": value,
  }
  if cfg.episodic:
    logits = world_model.termination_logit(cfg, params, zs[1:])
    # Binary cross-entropy with logits.
    termination = jnp.mean(jax.nn.softplus(logits) - logits * batch.terminated)
    loss = loss + cfg.termination_coef * termination
    info["termination_loss"] = termination
    info["termination_rate"] = jnp.mean(batch.terminated[-1])
    info["termination_f1"] = termination_f1(logits[-1], batch.terminated[-1])
  return loss, (zs, {**info, "total_loss": loss})


def policy_loss(
    cfg: AgentConfig,
    pi_params,
    params: world_model.Params,
    zs: jax.Array,
    scale: jax.Array,
    task: jax.Array | None,
    eps: jax.Array,
    pair: jax.Array,
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, PolicyAux]:
  """Policy loss (Eq. 4 with the sign of the reference, spec 2.11-2.13).

  Differentiable in `pi_params` only: latents, heads and embeddings are constants.

  Args:
    cfg: agent config.
    pi_params: parameters of the policy prior.
    params: the other parameters, after the world-model step.
    zs: latents [H+1, B, L] from before the step.
    scale: running Q scale f32[] before this batch.
    task: i32[B], or None.
    eps: noise of the policy sample [H+1, B, A].
    pair: the two online heads, i32[2].
    dropout_key: key for the dropout of the heads, or None.

  Returns:
    Loss f32[] and a `PolicyAux`.
  """
  params, zs = jax.lax.stop_gradient((params, zs))
  out = world_model.pi(cfg, {**params, "pi": pi_params}, zs, eps, task)
  value, slope = world_model.q_avg_and_action_grad(
      cfg, params["q"], params, zs, out.action, pair, task, dropout_key
  )
  scale = math.update_scale(scale, value[0], cfg.tau)
  # The first-order expansion around the sample has its value and its gradient.
  step = out.action - jax.lax.stop_gradient(out.action)
  value = value + jnp.sum(slope * step, axis=-1)

  rho = cfg.rho ** jnp.arange(cfg.horizon + 1, dtype=jnp.float32)
  gain = cfg.entropy_coef * out.scaled_entropy + value / scale
  loss = -jnp.mean(rho * jnp.mean(gain, axis=-1))
  info = {
      "pi_loss": loss,
      "pi_scale": scale,
      "pi_entropy": jnp.mean(out.entropy),
      "pi_scaled_entropy": jnp.mean(out.scaled_entropy),
  }
  return loss, PolicyAux(scale, info)
