"""Fish: swims in a fluid without gravity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from envs_mjx import rewards, rotations
from envs_mjx.physics import Physics, View, load_model
from envs_mjx.task import Start, Task

_N_SUBSTEPS = 10
_HEIGHT = 0.1  # of the start, metres
_NUM_JOINTS = 7
_JOINT_RANGE = 0.2  # rad, of the start
_TARGET_LOW, _TARGET_HIGH = (-0.4, -0.4, 0.1), (0.4, 0.4, 0.3)  # metres


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import fish

  model = load_model(*fish.get_model_and_assets())
  # The model disables constraints, so that contacts could not act.
  return Physics(model, _N_SUBSTEPS, colliding=())


class Fish(Task):
  """Model and reset of every fish task."""

  obs_size = 21

  def __init__(self):
    self.physics = _physics()
    model = self.physics.model
    self._mouth = np.float32(model.geom("mouth").pos)
    self._reach = float(model.geom("mouth").size[0] + model.geom("target").size[0])

  def initialize(self, key: jax.Array) -> Start:
    rotation_key, joints_key = jax.random.split(key)
    joints = jax.random.uniform(
      joints_key, (_NUM_JOINTS,), minval=-_JOINT_RANGE, maxval=_JOINT_RANGE
    )
    position = jnp.array([0.0, 0.0, _HEIGHT])
    return Start(jnp.concatenate([position, rotations.uniform(rotation_key), joints]))

  def observation(self, view: View) -> jax.Array:
    upright = self.rotation(view)[2, 2]
    return jnp.concatenate([view.qpos[7:], upright[None], view.qvel])

  def rotation(self, view: View) -> jax.Array:
    """Orientation of the torso f32[3, 3]."""
    return rotations.matrix(rotations.normalize(view.qpos[3:7]))


class Upright(Fish):
  """Holds the torso upright."""

  def reward(self, view: View) -> jax.Array:
    upright = jnp.minimum(self.rotation(view)[2, 2], 1.0)  # Rounding may exceed 1.
    return rewards.tolerance(upright, (1.0, 1.0), margin=1.0)


class Swim(Fish):
  """Brings the mouth to a target, and is upright."""

  obs_size = 24

  def initialize(self, key: jax.Array) -> Start:
    key, target_key = jax.random.split(key)
    low, high = jnp.array(_TARGET_LOW), jnp.array(_TARGET_HIGH)
    target = low + (high - low) * jax.random.uniform(target_key, (3,))
    return super().initialize(key)._replace(params={"geom_pos.target": target})

  def observation(self, view: View) -> jax.Array:
    x, y, z = self._mouth_to_target(view) @ self.rotation(view)
    # In the frame of the mouth, which is turned about the torso's x axis.
    to_target = jnp.stack([x, -z, y])
    joints, upright, velocity = jnp.split(super().observation(view), [7, 8])
    return jnp.concatenate([joints, upright, to_target, velocity])

  def reward(self, view: View) -> jax.Array:
    distance = jnp.linalg.norm(self._mouth_to_target(view))
    near = rewards.tolerance(distance, (0.0, self._reach), margin=2 * self._reach)
    upright = (self.rotation(view)[2, 2] + 1.0) / 2.0
    return (7.0 * near + upright) / 8.0

  def _mouth_to_target(self, view: View) -> jax.Array:
    """World-frame vector f32[3], metres."""
    mouth = view.qpos[:3] + self.rotation(view) @ self._mouth
    return view.params["geom_pos.target"] - mouth


TASKS = {"fish-swim": Swim, "fish-upright": Upright}
