"""Random joint positions, as dm_control's tasks draw them."""

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

# Plain integers: an enum of MuJoCo does not equal an integer of numpy.
_HINGE = int(mujoco.mjtJoint.mjJNT_HINGE)
_SLIDE = int(mujoco.mjtJoint.mjJNT_SLIDE)


def limited_and_rotational_joints(key: jax.Array, model: mujoco.MjModel) -> jax.Array:
  """Draws limited joints from their range and other hinges from the whole circle.

  Args:
    key: PRNG key.
    model: a model whose joints are hinges and slides.

  Returns:
    f32[nq] positions; unlimited slides keep their default.

  Raises:
    ValueError: the model has a ball or a free joint.
  """
  low, high = model.qpos0.copy(), model.qpos0.copy()
  for joint in map(model.joint, range(model.njnt)):
    if joint.type[0] not in (_HINGE, _SLIDE):
      raise ValueError(
        f"joint {joint.name!r} is neither a hinge nor a slide; draw its quaternion "
        "in the task."
      )
    address = joint.qposadr[0]
    if model.jnt_limited[joint.id]:
      low[address], high[address] = joint.range
    elif joint.type[0] == _HINGE:
      low[address], high[address] = -np.pi, np.pi
  low, high = jnp.float32(low), jnp.float32(high)
  return low + (high - low) * jax.random.uniform(key, low.shape)


def first_accepted(candidates: jax.Array, accepted: jax.Array) -> jax.Array:
  """Returns the first of f32[N, ...] that bool[N] accepts, the last if it does none."""
  return candidates[jnp.argmax(accepted.at[-1].set(True))]
