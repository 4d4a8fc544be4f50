"""dm_control's `tolerance`, the soft indicator that its rewards are made of."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# S(d, w): value at distance d > 0 (in margins) from the bounds, with S(1, w) = w.
# The parameter is a Python float, so its functions are computed in float64.
_SIGMOIDS: dict[str, Callable[[jax.Array, float], jax.Array]] = {
  "gaussian": lambda d, w: jnp.exp(np.log(w) * d**2),
  "hyperbolic": lambda d, w: 1.0 / jnp.cosh(np.arccosh(1.0 / w) * d),
  "long_tail": lambda d, w: 1.0 / (1.0 + (1.0 / w - 1.0) * d**2),
  "reciprocal": lambda d, w: 1.0 / (1.0 + (1.0 / w - 1.0) * jnp.abs(d)),
  "cosine": lambda d, w: _cosine(np.arccos(2.0 * w - 1.0) * d),
  "linear": lambda d, w: jnp.maximum(0.0, 1.0 - (1.0 - w) * d),
  "quadratic": lambda d, w: jnp.maximum(0.0, 1.0 - (1.0 - w) * d**2),
  "tanh_squared": lambda d, w: (
    1.0 - jnp.tanh(np.arctanh(np.sqrt(1.0 - w)) * d) ** 2
  ),
}
_ZERO_AT_MARGIN = ("cosine", "linear", "quadratic")


def _cosine(angle: jax.Array) -> jax.Array:
  return jnp.where(angle < jnp.pi, (1.0 + jnp.cos(angle)) / 2.0, 0.0)


def tolerance(
  x: jax.Array,
  bounds: tuple[float, float] = (0.0, 0.0),
  margin: float = 0.0,
  sigmoid: str = "gaussian",
  value_at_margin: float = 0.1,
) -> jax.Array:
  """Returns 1 where x lies within the bounds, falling to 0 outside them.

  Args:
    x: f32[...] what is judged, elementwise.
    bounds: lower and upper bound, both inclusive; may be infinite.
    margin: distance from the bounds at which the value is `value_at_margin`; 0 makes
      an indicator.
    sigmoid: shape of the fall: gaussian, hyperbolic, long_tail, reciprocal, cosine,
      linear, quadratic or tanh_squared.
    value_at_margin: in (0, 1); cosine, linear and quadratic allow 0.

  Returns:
    f32[...] in [0, 1].

  Raises:
    ValueError: bounds out of order, a negative margin, an unknown sigmoid, or a
      `value_at_margin` out of its range.
  """
  lower, upper = bounds
  _check(lower, upper, margin, sigmoid, value_at_margin)
  inside = (lower <= x) & (x <= upper)
  if margin == 0.0:
    return jnp.where(inside, 1.0, 0.0)
  # Inside the bounds the distance is replaced by 0, which keeps infinities out.
  distance = jnp.where(x < lower, lower - x, x - upper) / margin
  distance = jnp.where(inside, 0.0, distance)
  value = _SIGMOIDS[sigmoid](distance, value_at_margin)
  return jnp.where(inside, 1.0, value)


def _check(lower, upper, margin, sigmoid, value_at_margin):
  if lower > upper:
    raise ValueError(
      f"bounds must be (lower, upper), got ({lower}, {upper}); swap them."
    )
  if margin < 0.0:
    raise ValueError(f"margin must be 0 or more, got {margin}.")
  if sigmoid not in _SIGMOIDS:
    raise ValueError(f"sigmoid must be one of {sorted(_SIGMOIDS)}, got {sigmoid!r}.")
  zero_allowed = sigmoid in _ZERO_AT_MARGIN
  above = value_at_margin >= 0.0 if zero_allowed else value_at_margin > 0.0
  if margin > 0.0 and not (above and value_at_margin < 1.0):
    raise ValueError(
      f"value_at_margin of {sigmoid} must be in {'[' if zero_allowed else '('}0, 1), "
      f"got {value_at_margin}."
    )
