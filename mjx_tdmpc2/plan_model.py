"""The world model as the planner evaluates it.

Planning applies the same parameters to thousands of candidates. `arrange` rewrites
them once into a form with the same function and less work for each candidate:

* The first layers of dynamics and reward, which share their input, are one product.
  The task embedding, the same for all candidates of a decision, is a part of its bias.
* Layers are centred, so that LayerNorm need not compute a mean.
* Latents are reordered so that the units of a SimNorm group lie far apart, which
  lets the groups be normalised by whole vectors. `encode` gives this order, every
  function here takes it, and no result other than a latent shows it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mjx_tdmpc2 import networks, world_model
from mjx_tdmpc2.config import AgentConfig
from mjx_tdmpc2.world_model import Params


class PlanModel(NamedTuple):
  """Arranged parameters.

  params: parameters for the functions of `world_model` that take a latent and return
    none; `q` is a tuple of heads or stacked.
  encoder: the encoder as it was.
  joint: kernel f32[L+A, 2M] and bias f32[2M], the first layers of dynamics and reward
    without the rows of the task embedding.
  task_rows: f32[task_dim, 2M] those rows.
  """

  params: Params
  encoder: Any
  joint: networks.Layer
  task_rows: jax.Array


def arrange(cfg: AgentConfig, params: Params, stack_heads: bool) -> PlanModel:
  """Rewrites the parameters; done once for all decisions of a call.

  Args:
    cfg: agent config.
    params: world-model parameters.
    stack_heads: whether to stack the Q heads: choosing two heads is then a gather,
      as a batch of decisions with different draws needs, and not a branch.
  """
  centre, reorder = networks.centre, _reorder

  def arranged(layers: networks.Mlp, first=centre) -> networks.Mlp:
    kernel = layers[0]["kernel"]
    kernel = jnp.concatenate(
        [reorder(cfg, kernel[: cfg.latent_dim]), kernel[cfg.latent_dim :]]
    )
    hidden = [first({**layers[0], "kernel": kernel}), *map(centre, layers[1:-1])]
    return (*hidden, layers[-1])

  new = {**params, **{net: arranged(params[net]) for net in ("reward", "pi")}}
  *hidden, last = arranged(params["dynamics"])
  last = jax.tree.map(lambda leaf: reorder(cfg, leaf.T).T, last)
  new["dynamics"] = (*hidden, centre(last))
  # The first layer of a Q head may have dropout.
  new["q"] = tuple(arranged(head, first=lambda layer: layer) for head in params["q"])
  if stack_heads:
    new["q"] = world_model.stack_heads(new["q"])
  if cfg.episodic:
    new["termination"] = arranged(params["termination"])

  kernel, bias = (
      jnp.concatenate([new[net][0][leaf] for net in ("dynamics", "reward")], axis=-1)
      for leaf in ("kernel", "bias")
  )
  z_size, rest = cfg.latent_dim, cfg.latent_dim + cfg.task_dim
  kernel, task_rows = (
      jnp.concatenate([kernel[:z_size], kernel[rest:]]),
      kernel[z_size:rest],
  )
  return PlanModel(
      params=new,
      encoder=params["encoder"],
      joint={"kernel": kernel, "bias": bias},
      task_rows=task_rows,
  )


def for_task(model: PlanModel, task: jax.Array | None) -> PlanModel:
  """The model of one task i32[], or of the only one."""
  if task is None:
    return model
  bias = model.joint["bias"] + model.params["task_emb"][task] @ model.task_rows
  return model._replace(joint={**model.joint, "bias": bias})


def encode(
    cfg: AgentConfig, model: PlanModel, obs: jax.Array, task: jax.Array | None
) -> jax.Array:
  """Reordered latents f32[n, L] of observations f32[n, S]."""
  params = {**model.params, "encoder": model.encoder}
  return _reorder(cfg, world_model.encode(cfg, params, obs, task).T).T


def step(
    cfg: AgentConfig, model: PlanModel, z: jax.Array, action: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Rewards f32[n] and next latents f32[n, L] of actions f32[n, A].

  z is f32[n, L], or f32[1, L] where all start in one latent: then the latent's
  share of the first layer is computed once.
  """
  shared = z.shape[0] != action.shape[0]
  x = (z, action) if shared else jnp.concatenate([z, action], axis=-1)
  joint = networks.linear(model.joint, x)
  dynamics, reward = model.params["dynamics"], model.params["reward"]
  hidden, hidden_reward = (
      networks.normed(layers[0], part)
      for layers, part in zip(
          (dynamics, reward), jnp.split(joint, 2, axis=-1), strict=True
      )
  )
  logits = networks.mlp(reward[1:], hidden_reward)
  hidden = networks.normed_linear(dynamics[1], hidden)
  last = dynamics[2]
  next_z = networks.layer_norm(
      networks.linear(last, hidden), last["ln_scale"], last["ln_bias"], centred=True
  )
  return world_model.decode(cfg, logits), _simnorm(cfg, next_z)


def _reorder(cfg: AgentConfig, x: jax.Array) -> jax.Array:
  """Reorders the leading axis L: unit v of group g moves from g·V + v to v·G + g."""
  groups = x.reshape(cfg.latent_dim // cfg.simnorm_dim, cfg.simnorm_dim, *x.shape[1:])
  return jnp.swapaxes(groups, 0, 1).reshape(x.shape)


def _simnorm(cfg: AgentConfig, x: jax.Array) -> jax.Array:
  """SimNorm of reordered latents [..., L]."""
  num_groups = cfg.latent_dim // cfg.simnorm_dim
  groups = x.reshape(*x.shape[:-1], cfg.simnorm_dim, num_groups)
  return jax.nn.softmax(groups, axis=-2).reshape(x.shape)
