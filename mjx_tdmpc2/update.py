"""One update of world model, policy prior, Q scale and target heads (spec 2.C)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from mjx_tdmpc2 import losses, world_model
from mjx_tdmpc2.config import AgentConfig
from mjx_tdmpc2.types import Batch


@struct.dataclass
class LearnerState:
  """What an update reads and writes.

  params: world-model parameters, `pi` included. target_q: target heads.
  wm_opt, pi_opt: Adam states of everything but `pi`, and of `pi`.
  scale: running Q scale, f32[]. updates: number of updates done, i32[].
  """

  params: world_model.Params
  target_q: Any
  wm_opt: optax.OptState
  pi_opt: optax.OptState
  scale: jax.Array
  updates: jax.Array


class UpdateDraws(NamedTuple):
  """All randomness of one update.

  td_pi_eps: [H, B, A] and policy_pi_eps: [H+1, B, A], policy noise.
  td_pair, policy_pair: i32[2], the Q heads of the TD target and the policy loss.
  td_dropout, value_dropout, policy_dropout: dropout keys; None: no dropout there.
  """

  td_pi_eps: jax.Array
  td_pair: jax.Array
  policy_pi_eps: jax.Array
  policy_pair: jax.Array
  td_dropout: jax.Array | None = None
  value_dropout: jax.Array | None = None
  policy_dropout: jax.Array | None = None


# Spec 2.9, 2.14: torch's Adam, with learning rates applied by `_descend`.
_WM_ADAM = optax.scale_by_adam(eps=1e-8)
_PI_ADAM = optax.scale_by_adam(eps=1e-5)


def _without_pi(params: world_model.Params) -> world_model.Params:
  return {name: value for name, value in params.items() if name != "pi"}


def init_learner(cfg: AgentConfig, key: jax.Array) -> LearnerState:
  """Learner before its first update."""
  params = world_model.init_params(key, cfg)
  return LearnerState(
      params=params,
      target_q=world_model.init_target(params),
      wm_opt=_WM_ADAM.init(_without_pi(params)),
      pi_opt=_PI_ADAM.init(params["pi"]),
      scale=jnp.ones((), jnp.float32),
      updates=jnp.zeros((), jnp.int32),
  )


def draw_update(cfg: AgentConfig, key: jax.Array, batch_size: int) -> UpdateDraws:
  """Draws the randomness of one update on windows [H+1, batch_size]."""
  k_eps, k_pairs, k_dropout = jax.random.split(key, 3)
  horizon = cfg.horizon
  # Few large draws: the generator is dear to compile.
  shape = (2 * horizon + 1, batch_size, cfg.action_size)
  eps = jax.random.normal(k_eps, shape)
  pairs = world_model.draw_pairs(k_pairs, cfg.num_q, 2)
  dropout = cfg.dropout > 0.0
  td_dropout = dropout and cfg.q_dropout_form == "paper"
  keys = jax.random.split(k_dropout, 3)
  return UpdateDraws(
      td_pi_eps=eps[:horizon],
      td_pair=pairs[0],
      policy_pi_eps=eps[horizon:],
      policy_pair=pairs[1],
      td_dropout=keys[0] if td_dropout else None,
      value_dropout=keys[1] if dropout else None,
      policy_dropout=keys[2] if dropout else None,
  )


def clip_by_norm(grads, max_norm: float):
  """(clipped gradients, norm before), by torch's rule max/(norm + 1e-6) (spec 2.10)."""
  norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
  coef = jnp.minimum(1.0, max_norm / (norm + 1e-6))
  return jax.tree.map(lambda g: g * coef, grads), norm


def _descend(params, directions, lr: float):
  return jax.tree.map(lambda p, d: p - lr * d, params, directions)


def _model_step(cfg, learner: LearnerState, params, grads):
  """World-model parameters after the step, optimiser state, norm before the clip."""
  grads, norm = clip_by_norm(grads, cfg.grad_clip_norm)
  directions, opt = _WM_ADAM.update(grads, learner.wm_opt)
  stepped = {
      name: _descend(
          params[name],
          directions[name],
          cfg.lr * (cfg.enc_lr_scale if name == "encoder" else 1.0),
      )
      for name in grads
  }
  return {**params, **stepped}, opt, norm


def update(
    cfg: AgentConfig, learner: LearnerState, batch: Batch, draws: UpdateDraws
) -> tuple[LearnerState, losses.Info]:
  """One update in the reference's order (spec 2.19, 2.C).

  Target and latents use the parameters before the step; the policy loss and the
  target average use the Q heads and embeddings after it.

  Args:
    cfg: agent config.
    learner: state before.
    batch: windows.
    draws: randomness, as from `draw_update`.

  Returns:
    State after, and f32[] scalars to log.
  """
  task = batch.task
  with jax.named_scope("td_target"):
    params = world_model.renorm_task_emb(learner.params, task)
    next_z = jax.lax.stop_gradient(
        world_model.encode(cfg, params, batch.obs[1:], task)
    )
    target = losses.td_target(
        cfg, params, learner.target_q, next_z, batch,
        draws.td_pi_eps, draws.td_pair, draws.td_dropout,
    )  # fmt: skip

  with jax.named_scope("world_model"):
    grad_fn = jax.value_and_grad(losses.model_loss, argnums=1, has_aux=True)
    (_, (zs, info)), grads = grad_fn(
        cfg, _without_pi(params), batch, next_z, target, draws.value_dropout
    )
    params, wm_opt, grad_norm = _model_step(cfg, learner, params, grads)

  with jax.named_scope("policy"):
    # The step may have pushed rows out of the unit ball again (spec 1.22).
    params = world_model.renorm_task_emb(params, task)
    grad_fn = jax.grad(losses.policy_loss, argnums=1, has_aux=True)
    grads, aux = grad_fn(
        cfg, params["pi"], params, zs, learner.scale, task,
        draws.policy_pi_eps, draws.policy_pair, draws.policy_dropout,
    )  # fmt: skip
    grads, pi_grad_norm = clip_by_norm(grads, cfg.grad_clip_norm)
    directions, pi_opt = _PI_ADAM.update(grads, learner.pi_opt)
    params = {**params, "pi": _descend(params["pi"], directions, cfg.lr)}

  with jax.named_scope("target_average"):
    target_q = jax.tree.map(
        lambda old, new: old + cfg.tau * (new - old), learner.target_q, params["q"]
    )
  info = {**info, **aux.info, "grad_norm": grad_norm, "pi_grad_norm": pi_grad_norm}
  return LearnerState(
      params, target_q, wm_opt, pi_opt, aux.scale, learner.updates + 1
  ), info
