"""Contacts of spheres and capsules with ellipsoids, to float32's limit.

MJX finds them by a descent on signed distances that stops early: it misses contacts,
and reports some that C MuJoCo does not have. Here the nearest point of an ellipsoid
comes from Newton's method on its one-dimensional equation, and the nearest point of a
capsule's axis from bisection.

Arguments and results are those of the functions in `envs_mjx.collision`.
"""

import jax
import jax.numpy as jnp

_NEWTON_STEPS = 10
_HALVINGS = 18
_OFF_PLANE = 1e-5
_TINY = 1e-12


def distance(point: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Signed distance of a point from an ellipsoid's surface, negative inside.

  Args:
    point: f[3] in the ellipsoid's frame.
    size: f[3] semi-axes.

  Returns:
    f[] the distance, and f[3] the outward unit normal at the nearest surface point.
  """
  scale = jnp.max(size)
  axes = size / scale
  side = jnp.where(point < 0, -1.0, 1.0)
  # Never quite in a plane of symmetry, where the equation would lose a root.
  z = jnp.maximum(jnp.abs(point) / scale, _OFF_PLANE * axes)
  # The nearest point x has x_i = e_i² z_i / (t + e_i²) for the root t of
  # Σ (e_i z_i / (t + e_i²))² = 1, a convex function left of which Newton never passes.
  squares = axes * axes
  lowest = -jnp.min(squares)
  t = jnp.maximum(jnp.max(axes * z - squares), lowest + 1e-6)

  def newton(_, t):
    ratio = axes * z / (t + squares)
    value = jnp.sum(ratio * ratio) - 1.0
    slope = -2.0 * jnp.sum(ratio * ratio / (t + squares))
    return jnp.maximum(t - value / jnp.minimum(slope, -_TINY), lowest + 1e-6)

  t = jax.lax.fori_loop(0, _NEWTON_STEPS, newton, t)
  x = squares * z / (t + squares)
  # Onto the surface, where few iterations or a point near a plane of symmetry leave it.
  x = x / jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x / axes)), _TINY))
  normal = x / squares
  normal = normal / jnp.maximum(jnp.linalg.norm(normal), _TINY)
  return scale * jnp.dot(z - x, normal), side * normal


def sphere_ellipsoid(sphere_pos, sphere_mat, sphere_size, pos, mat, size):
  """One contact (dist f[], pos f[3], normal f[3] from the sphere to the ellipsoid)."""
  del sphere_mat
  dist, normal = distance((sphere_pos - pos) @ mat, size)
  normal = -(mat @ normal)
  dist = dist - sphere_size[0]
  return dist, sphere_pos + normal * (sphere_size[0] + 0.5 * dist), normal


def capsule_ellipsoid(cap_pos, cap_mat, cap_size, pos, mat, size):
  """One contact (dist f[], pos f[3], normal f[3] from the capsule to the ellipsoid)."""
  centre = (cap_pos - pos) @ mat
  axis = cap_mat[:, 2] @ mat

  # The distance is convex along the axis; its derivative is the normal's share of it.
  def halve(_, bounds):
    low, high = bounds
    middle = 0.5 * (low + high)
    rising = jnp.dot(distance(centre + middle * axis, size)[1], axis) > 0.0
    return jnp.where(rising, low, middle), jnp.where(rising, middle, high)

  low, high = jax.lax.fori_loop(0, _HALVINGS, halve, (-cap_size[1], cap_size[1]))
  nearest = cap_pos + 0.5 * (low + high) * cap_mat[:, 2]
  return sphere_ellipsoid(nearest, cap_mat, cap_size, pos, mat, size)
