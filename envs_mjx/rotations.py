"""Unit quaternions (w, x, y, z)."""

import jax
import jax.numpy as jnp


def normalize(quaternion: jax.Array) -> jax.Array:
  """f32[..., 4] scaled to length 1."""
  return quaternion / jnp.linalg.norm(quaternion, axis=-1, keepdims=True)


def matrix(quaternion: jax.Array) -> jax.Array:
  """Rotation matrices f32[..., 3, 3] of unit quaternions; columns are body axes."""
  w, x, y, z = jnp.moveaxis(quaternion, -1, 0)
  rows = [
    [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
    [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
    [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
  ]
  return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


def uniform(key: jax.Array) -> jax.Array:
  """A uniformly distributed rotation, f32[4]."""
  return normalize(jax.random.normal(key, (4,)))
