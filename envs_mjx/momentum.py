"""Angular momentum of a whole body."""

import jax
import jax.numpy as jnp
import mujoco
from mujoco import mjx


def angular_momentum(
  model: mujoco.MjModel, data: mjx.Data, root: int
) -> jax.Array:
  """Angular momentum f32[3] of a tree about its centre of mass, kg·m²/s, world frame.

  Args:
    model: the compiled C model.
    data: with position and velocity stages done.
    root: body id of the tree's root, a child of the world.
  """
  bodies = [b for b in range(model.nbody) if model.body_rootid[b] == root]
  mass = jnp.float32(model.body_mass[bodies])[:, None]
  inertia = jnp.float32(model.body_inertia[bodies])
  axes = data.ximat[jnp.array(bodies)]
  offset = data.xipos[jnp.array(bodies)] - data.subtree_com[root]
  # MuJoCo gives the velocity of each body at the tree's centre of mass.
  angular, linear = jnp.split(data.cvel[jnp.array(bodies)], 2, axis=-1)
  velocity = linear + jnp.cross(angular, offset)
  spin = jnp.einsum("bij,bj,bkj,bk->bi", axes, inertia, axes, angular)
  return jnp.sum(spin + mass * jnp.cross(offset, velocity), axis=0)
