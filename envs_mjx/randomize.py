"""Random joint positions, as dm_control's tasks draw them."""

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from envs_mjx import rotations

# Plain integers: an enum of MuJoCo does not equal an integer of numpy.
_FREE = int(mujoco.mjtJoint.mjJNT_FREE)
_BALL = int(mujoco.mjtJoint.mjJNT_BALL)
_HINGE = int(mujoco.mjtJoint.mjJNT_HINGE)
_SLIDE = int(mujoco.mjtJoint.mjJNT_SLIDE)


def limited_and_rotational_joints(key: jax.Array, model: mujoco.MjModel) -> jax.Array:
  """Draws limited joints from their range and other hinges from the whole circle.

  The quaternion of a free joint is made of four numbers in [0, 1), as in dm_control:
  its orientations are not uniform.

  Args:
    key: PRNG key.
    model: a model without ball joints.

  Returns:
    f32[nq] positions; unlimited slides and free joints' positions keep their default.

  Raises:
    ValueError: the model has a ball joint.
  """
  low, high = model.qpos0.copy(), model.qpos0.copy()
  quaternions = []
  for joint in map(model.joint, range(model.njnt)):
    address = joint.qposadr[0]
    if joint.type[0] == _BALL:
      raise ValueError(
        f"joint {joint.name!r} is a ball joint; draw its quaternion in the task."
      )
    if joint.type[0] == _FREE:
      quaternions.append(slice(address + 3, address + 7))
      low[quaternions[-1]], high[quaternions[-1]] = 0.0, 1.0
    elif model.jnt_limited[joint.id]:
      low[address], high[address] = joint.range
    elif joint.type[0] == _HINGE:
      low[address], high[address] = -np.pi, np.pi
  low, high = jnp.float32(low), jnp.float32(high)
  qpos = low + (high - low) * jax.random.uniform(key, low.shape)
  for where in quaternions:
    qpos = qpos.at[where].set(rotations.normalize(qpos[where]))
  return qpos


def first_accepted(candidates: jax.Array, accepted: jax.Array) -> jax.Array:
  """Returns the first of f32[N, ...] that bool[N] accepts, the last if it does none."""
  return candidates[jnp.argmax(accepted.at[-1].set(True))]
