"""The world model: encoder, dynamics, reward, termination, policy prior, Q heads.

Pure functions of a parameter dict with the keys `encoder`, `dynamics`, `reward`,
`pi`, `q` (a tuple of Nq MLPs), and `termination` (episodic) and `task_emb`
[num_tasks, task_dim] (multi-task) where the config asks for them. Target heads are
a separate tuple like `q`.

`task` is None with a single task, else int32 with a shape that broadcasts against
the leading axes of the other inputs: [] or [B] for [H, B, ...]. Look-ups read the
embedding table as it is; `renorm_task_emb` keeps its rows within the unit ball.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mjx_tdmpc2 import math, networks
from mjx_tdmpc2.config import AgentConfig

Params = dict[str, Any]


class PiOutput(NamedTuple):
  """A sample of the policy prior.

  action: tanh(μ + ε·σ), [..., A]; mean: tanh(μ), [..., A]; log_std: [..., A].
  entropy: minus the sample's log-density, [...], for logging.
  scaled_entropy: what the policy loss rewards with the entropy coefficient, [...];
    its form is `AgentConfig.entropy_form`.
  """

  action: jax.Array
  mean: jax.Array
  log_std: jax.Array
  entropy: jax.Array
  scaled_entropy: jax.Array


def init_params(key: jax.Array, cfg: AgentConfig) -> Params:
  """Initial parameters (spec 1.4-1.10, 1.13); each Q head draws its own."""
  obs_in = cfg.obs_size + cfg.task_dim
  z_in = cfg.latent_dim + cfg.task_dim
  za_in = z_in + cfg.action_size
  hidden = (cfg.mlp_dim, cfg.mlp_dim)
  enc_hidden = (cfg.enc_dim,) * max(cfg.num_enc_layers - 1, 1)
  k_enc, k_dyn, k_rew, k_term, k_pi, k_q, k_emb = jax.random.split(key, 7)

  init = networks.init_mlp
  params: Params = {
      "encoder": init(k_enc, (obs_in, *enc_hidden, cfg.latent_dim), normed_last=True),
      "dynamics": init(k_dyn, (za_in, *hidden, cfg.latent_dim), normed_last=True),
      "reward": init(k_rew, (za_in, *hidden, cfg.num_bins), zero_last=True),
      "pi": init(k_pi, (z_in, *hidden, 2 * cfg.action_size)),
      "q": tuple(
          init(k, (za_in, *hidden, cfg.num_bins), zero_last=True)
          for k in jax.random.split(k_q, cfg.num_q)
      ),
  }
  if cfg.episodic:
    params["termination"] = init(k_term, (z_in, *hidden, 1))
  if cfg.multitask:
    params["task_emb"] = jax.random.uniform(
        k_emb, (cfg.num_tasks, cfg.task_dim), jnp.float32, -0.02, 0.02
    )
  return params


def init_target(params: Params) -> tuple[networks.Mlp, ...]:
  """Target Q heads: an exact copy of the online heads (spec 1.12)."""
  return jax.tree.map(jnp.copy, params["q"])


def renorm_task_emb(params: Params, task: jax.Array | None) -> Params:
  """Scales the looked-up embedding rows longer than 1 back to 1 (spec 1.22).

  Rows of other tasks stay as they are. The result replaces the stored table;
  gradients do not see the scaling.
  """
  if task is None:
    return params
  table = params["task_emb"]
  rows = table[task]
  norm = jnp.linalg.norm(rows, axis=-1, keepdims=True)
  rows = jnp.where(norm > 1.0, rows / (norm + 1e-7), rows)
  return {**params, "task_emb": table.at[task].set(rows)}


def action_mask(cfg: AgentConfig, task: jax.Array | None) -> jax.Array | None:
  """1 for the valid action dims of each task, else 0: f32[..., A] (spec 1.23).

  None with a single task, where all dims are valid.
  """
  if task is None:
    return None
  dims = jnp.asarray(cfg.action_dims, jnp.int32)[task]
  return (jnp.arange(cfg.action_size) < dims[..., None]).astype(jnp.float32)


def discount(cfg: AgentConfig, task: jax.Array | None) -> jax.Array:
  """Discount per agent step: f32[], or f32 of `task`'s shape (spec 2.20)."""
  table = jnp.asarray(cfg.discounts, jnp.float32)
  return table[0] if task is None else table[task]


def _concat(params: Params, task, x: jax.Array, *rest: jax.Array) -> jax.Array:
  """[x, e, *rest] with the task embedding e in the middle (spec 1.22)."""
  parts = [x, *rest]
  if task is not None:
    emb = params["task_emb"][task]
    parts.insert(1, jnp.broadcast_to(emb, (*x.shape[:-1], emb.shape[-1])))
  return jnp.concatenate(parts, axis=-1) if len(parts) > 1 else x


def encode(
    cfg: AgentConfig, params: Params, obs: jax.Array, task: jax.Array | None = None
) -> jax.Array:
  """Latent z [..., L] of observations [..., S] (Eq. 2, spec 1.4)."""
  x = _concat(params, task, obs)
  return networks.mlp(
      params["encoder"], x, "simnorm", simnorm_dim=cfg.simnorm_dim
  )


def next_latent(
    cfg: AgentConfig,
    params: Params,
    z: jax.Array,
    a: jax.Array,
    task: jax.Array | None = None,
) -> jax.Array:
  """Predicted next latent [..., L] after action a [..., A] (Eq. 2, spec 1.5)."""
  x = _concat(params, task, z, a)
  return networks.mlp(
      params["dynamics"], x, "simnorm", simnorm_dim=cfg.simnorm_dim
  )


def reward_logits(
    cfg: AgentConfig,
    params: Params,
    z: jax.Array,
    a: jax.Array,
    task: jax.Array | None = None,
) -> jax.Array:
  """Logits [..., K] of the two-hot reward distribution (Eq. 2, spec 1.6)."""
  del cfg
  return networks.mlp(params["reward"], _concat(params, task, z, a))


def decode(cfg: AgentConfig, logits: jax.Array) -> jax.Array:
  """Raw scalars [...] of reward or Q logits [..., K] (spec 1.16)."""
  return math.two_hot_inv(logits, cfg.vmin, cfg.vmax)


def termination_logit(cfg: AgentConfig, params: Params, z: jax.Array) -> jax.Array:
  """Logit [...] that the state z is terminal (episodic, single task; spec 1.7)."""
  del cfg
  return networks.mlp(params["termination"], z)[..., 0]


def pi(
    cfg: AgentConfig,
    params: Params,
    z: jax.Array,
    eps: jax.Array,
    task: jax.Array | None = None,
) -> PiOutput:
  """Samples the policy prior with given noise (spec 1.8, 1.9).

  Args:
    cfg: agent config.
    params: world-model parameters.
    z: latents [..., L].
    eps: standard normal noise [..., A].
    task: task ids, or None.

  Returns:
    A `PiOutput`. Invalid action dims of a task are exactly 0.
  """
  out = networks.mlp(params["pi"], _concat(params, task, z))
  mu, raw = jnp.split(out, 2, axis=-1)
  half_range = 0.5 * (cfg.log_std_max - cfg.log_std_min)
  log_std = cfg.log_std_min + half_range * (jnp.tanh(raw) + 1.0)
  num_dims = float(cfg.action_size)
  mask = action_mask(cfg, task)
  if mask is not None:
    mu, log_std, eps = mu * mask, log_std * mask, eps * mask
    num_dims = jnp.sum(mask, axis=-1)
  action = jnp.tanh(mu + eps * jnp.exp(log_std))

  terms = math.gaussian_log_prob_terms(eps, log_std)
  log_det = math.tanh_log_det(action)
  # Invalid dims count in the constant, as in the reference.
  log_density = terms - cfg.action_size * math.HALF_LOG_2PI
  if cfg.entropy_form == "paper":
    scaled_entropy = log_det - num_dims * (terms - math.HALF_LOG_2PI)
  else:
    scaled_entropy = -num_dims * log_density
  return PiOutput(
      action=action,
      mean=jnp.tanh(mu),
      log_std=log_std,
      entropy=log_det - log_density,
      scaled_entropy=scaled_entropy,
  )


def draw_pairs(key: jax.Array, num_q: int, count: int) -> jax.Array:
  """Draws pairs of distinct heads, i32[count, 2]; all ordered pairs alike (1.11)."""
  ticket = jax.random.randint(key, (count,), 0, num_q * (num_q - 1))
  first, step = ticket // (num_q - 1), ticket % (num_q - 1) + 1
  return jnp.stack([first, (first + step) % num_q], axis=-1)


def stack_heads(heads: tuple[networks.Mlp, ...]) -> networks.Mlp:
  """Stacks a tuple of Nq MLPs into one MLP pytree with a leading axis Nq."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *heads)


def _is_stacked(heads) -> bool:
  return isinstance(heads[0], dict)


def _stacked(cfg: AgentConfig, heads):
  """The stacked heads if that is their layout, else None."""
  if _is_stacked(heads):
    return heads
  return stack_heads(heads) if cfg.q_layout == "stacked" else None


def _mask(cfg: AgentConfig, dropout_key, index, shape: tuple[int, ...]):
  """Dropout mask of one head, or None; it depends on key and index only."""
  if dropout_key is None or cfg.dropout == 0.0:
    return None
  key = jax.random.fold_in(dropout_key, index)
  return networks.dropout_mask(key, cfg.dropout, (*shape, cfg.mlp_dim))


def _head(cfg: AgentConfig, head: networks.Mlp, x, mask) -> jax.Array:
  """Logits of one head, with a dropout mask or None."""
  return networks.mlp(head, x, dropout=None if mask is None else (mask, cfg.dropout))


def q_all(
    cfg: AgentConfig,
    heads,
    params: Params,
    z: jax.Array,
    a: jax.Array,
    task: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
  """Logits of all Q heads (spec 1.10, 1.11).

  Args:
    cfg: agent config.
    heads: online or target heads, a tuple of MLPs or the result of `stack_heads`.
    params: world-model parameters (for the task embedding).
    z: latents [..., L].
    a: actions [..., A].
    task: task ids, or None.
    dropout_key: key for the dropout masks, independent by head; None: no dropout.

  Returns:
    Logits [Nq, ..., K].
  """
  x = _concat(params, task, z, a)
  # One draw for all heads: the generator is dear to compile.
  index = jnp.arange(cfg.num_q)
  masks = jax.vmap(lambda i: _mask(cfg, dropout_key, i, x.shape[:-1]))(index)
  stacked = _stacked(cfg, heads)
  if stacked is not None:
    return jax.vmap(lambda head, mask: _head(cfg, head, x, mask))(stacked, masks)
  split = [None if masks is None else masks[i] for i in range(cfg.num_q)]
  return jnp.stack([_head(cfg, h, x, m) for h, m in zip(heads, split, strict=True)])


def _drawn(cfg: AgentConfig, heads, pair: jax.Array, fn, x):
  """(fn(head, index, x) of the first drawn head, the same of the second).

  With heads as a list a switch chooses the parameters. Its copy of one head costs
  little beside the evaluation, which so is compiled twice and not 2·Nq times.
  """
  stacked = _stacked(cfg, heads)
  if stacked is None:
    choices = [lambda head=head: head for head in heads]
    return tuple(fn(jax.lax.switch(i, choices), i, x) for i in (pair[0], pair[1]))
  drawn = jax.tree.map(lambda leaf: leaf[pair], stacked)
  out = jax.vmap(fn, in_axes=(0, 0, None))(drawn, pair, x)
  first, second = (jax.tree.map(operator.itemgetter(i), out) for i in range(2))
  return first, second


def q_pair(
    cfg: AgentConfig,
    heads,
    params: Params,
    z: jax.Array,
    a: jax.Array,
    pair: jax.Array,
    reduce: str = "min",
    task: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
  """Decoded values of the two drawn heads, reduced (spec 1.11).

  Only the drawn heads are evaluated, each with the masks that `q_all` would use.

  Args:
    cfg: agent config.
    heads: online or target heads, a tuple of MLPs or the result of `stack_heads`.
    params: world-model parameters (for the task embedding).
    z: latents [..., L].
    a: actions [..., A].
    pair: two distinct head indices, i32[2].
    reduce: "min" or "avg", over the two decoded scalars.
    task: task ids, or None.
    dropout_key: key for the dropout masks; None: no dropout.

  Returns:
    Values [...].
  """

  def value(head, index, x):
    mask = _mask(cfg, dropout_key, index, x.shape[:-1])
    return decode(cfg, _head(cfg, head, x, mask))

  x = _concat(params, task, z, a)
  first, second = _drawn(cfg, heads, pair, value, x)
  if reduce == "min":
    return jnp.minimum(first, second)
  return 0.5 * (first + second)


def q_avg_and_action_grad(
    cfg: AgentConfig,
    heads,
    params: Params,
    z: jax.Array,
    a: jax.Array,
    pair: jax.Array,
    task: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`q_pair(..., "avg")` and its gradient with respect to the action.

  Each value depends on its own action only, so one backward pass gives all
  gradients. Nothing flows to latents, heads or embeddings (spec 2.17).

  Args:
    cfg: agent config.
    heads: Q heads, a tuple of MLPs or the result of `stack_heads`.
    params: world-model parameters (for the task embedding).
    z: latents [..., L].
    a: actions [..., A].
    pair: two distinct head indices, i32[2].
    task: task ids, or None.
    dropout_key: key for the dropout masks; None: no dropout.

  Returns:
    Values [...] and gradients [..., A].
  """

  def value_and_grad(head, index, x):
    mask = _mask(cfg, dropout_key, index, z.shape[:-1])

    def value(action):
      parts = (x[0], action)
      return decode(cfg, _head(cfg, head, parts, mask))

    out, pullback = jax.vjp(value, x[1])
    return out, pullback(jnp.ones_like(out))[0]

  x = jax.lax.stop_gradient((_concat(params, task, z), a))
  first, second = _drawn(cfg, heads, pair, value_and_grad, x)
  return jax.tree.map(lambda u, v: 0.5 * (u + v), first, second)
