"""Scalar transforms, two-hot distributions, log-densities and running scale.

Shapes follow the legend in `mjx_tdmpc2.types`; everything is float32.
"""

import jax
import jax.numpy as jnp

HALF_LOG_2PI = 0.9189385175704956


def symlog(x: jax.Array) -> jax.Array:
  """sign(x)·log(1 + |x|), elementwise (spec 1.14)."""
  return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: jax.Array) -> jax.Array:
  """Inverse of `symlog`, elementwise (spec 1.14)."""
  return jnp.sign(x) * jnp.expm1(jnp.abs(x))


def two_hot(
    x: jax.Array, vmin: float, vmax: float, num_bins: int
) -> jax.Array:
  """Soft targets over bins that are evenly spaced in symlog space (spec 1.15).

  Each weight is max(0, 1 - distance to the bin in bin units), which equals the
  usual "two neighbouring bins" form and needs no scatter.

  Args:
    x: raw scalars [...]; values outside the bins count as the edge bins.
    vmin: first bin, in symlog units.
    vmax: last bin, in symlog units.
    num_bins: K, at least 2.

  Returns:
    Weights [..., K]; each row sums to 1.
  """
  bin_size = (vmax - vmin) / (num_bins - 1)
  pos = (jnp.clip(symlog(x), vmin, vmax) - vmin) / bin_size
  # Rounding may put the last position a hair beyond the last bin.
  pos = jnp.clip(pos, 0.0, num_bins - 1)
  bins = jnp.arange(num_bins, dtype=jnp.float32)
  return jnp.maximum(0.0, 1.0 - jnp.abs(pos[..., None] - bins))


def two_hot_inv(logits: jax.Array, vmin: float, vmax: float) -> jax.Array:
  """Decodes logits [..., K] to raw scalars [...] (spec 1.16).

  The expectation is taken in symlog space, then mapped back by `symexp`.
  """
  bins = jnp.linspace(vmin, vmax, logits.shape[-1], dtype=jnp.float32)
  return symexp(jnp.sum(jax.nn.softmax(logits, axis=-1) * bins, axis=-1))


def soft_ce(logits: jax.Array, weights: jax.Array) -> jax.Array:
  """Cross-entropy -Σ_k w_k·log softmax(logits)_k, shape [...] (spec 1.17).

  Args:
    logits: predictions [..., K].
    weights: target weights [..., K] that sum to 1, as from `two_hot`.
  """
  return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(weights * logits, axis=-1)


def gaussian_log_prob_terms(eps: jax.Array, log_std: jax.Array) -> jax.Array:
  """Σ_d(-½ε² - log σ), shape [...]: a Gaussian log-density without its constant.

  Args:
    eps: standard normal noise [..., A] that made the sample.
    log_std: log standard deviations [..., A].
  """
  return jnp.sum(-0.5 * jnp.square(eps) - log_std, axis=-1)


def tanh_log_det(action: jax.Array) -> jax.Array:
  """Σ_d log(relu(1 - a²) + 1e-6) over squashed actions [..., A] (spec 1.9)."""
  return jnp.sum(jnp.log(jax.nn.relu(1.0 - jnp.square(action)) + 1e-6), axis=-1)


def percentile_range(x: jax.Array, low: float = 5.0, high: float = 95.0) -> jax.Array:
  """Distance between two linearly interpolated percentiles of x [B] (spec 2.13)."""
  x = jnp.sort(x)

  def percentile(q):
    # Static index arithmetic: B is known when tracing.
    position = q * (x.shape[0] - 1) / 100.0
    below = int(position)
    above = min(below + 1, x.shape[0] - 1)
    weight = position - below
    return x[below] * (1.0 - weight) + x[above] * weight

  return percentile(high) - percentile(low)


def update_scale(scale: jax.Array, x: jax.Array, tau: float) -> jax.Array:
  """Moves the running scale towards the 5-95 percentile range of x (spec 2.13).

  Args:
    scale: current scale, f32[].
    x: values [B].
    tau: rate of the moving average.

  Returns:
    New scale, f32[]; at least 1 if `scale` was.
  """
  value = jnp.maximum(percentile_range(x), 1.0)
  return scale + tau * (value - scale)


def discount_heuristic(
    episode_length: float,
    denom: float = 5.0,
    low: float = 0.95,
    high: float = 0.995,
) -> float:
  """Discount from the episode length in agent steps (Eq. 7, spec 2.20)."""
  fraction = episode_length / denom
  return min(max((fraction - 1.0) / fraction, low), high)
