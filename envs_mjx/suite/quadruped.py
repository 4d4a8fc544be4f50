"""Quadruped: a heavy four-legged body walks or runs."""

import functools

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from envs_mjx import rotations
from envs_mjx.physics import Physics, Stage, View, load_model
from envs_mjx.task import Start, Task

# Up to 5 contacts were seen at once under random actions, all with the floor.
_MAX_CONTACTS = 24
_N_SUBSTEPS = 4
_ROOT_QPOS, _ROOT_QVEL = 7, 6
_HEIGHT_STEP = 0.01  # metres: resets try heights that are its multiples
_TOES = ("front_left", "front_right", "back_right", "back_left")


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import common, quadruped

  # The size of the floor, which walk and run set differently, is for rendering only.
  model = load_model(
    quadruped.make_model(floor_size=10), common.ASSETS, max_contacts=_MAX_CONTACTS
  )
  return Physics(
    model, _N_SUBSTEPS, stage=Stage.VELOCITY, acceleration_sensors=True
  )


class Move(Task):
  """Stands upright and moves forward.

  Args:
    speed: metres per second at which the reward is full.
  """

  obs_size = 78

  def __init__(self, speed: float):
    self.physics = _physics()
    self._speed = speed
    sensor = self.physics.sensor
    self._torso = self.physics.model.body("torso").id
    self._velocity = sensor("velocimeter")
    self._inertial = [sensor("imu_accel"), sensor("imu_gyro")]
    self._toes = [
      sensor(f"{kind}_toe_{toe}") for kind in ("force", "torque") for toe in _TOES
    ]
    self._outline = _Outline(self.physics.model)

  def initialize(self, key: jax.Array) -> Start:
    """Draws an orientation; the legs stay as they are, just above the floor."""
    rotation = rotations.uniform(key)
    depth = self._outline.depth(rotations.matrix(rotation))
    height = _HEIGHT_STEP * jnp.ceil(depth / _HEIGHT_STEP)
    position = jnp.stack([jnp.zeros(()), jnp.zeros(()), height])
    legs = jnp.zeros(self.physics.model.nq - _ROOT_QPOS)
    return Start(jnp.concatenate([position, rotation, legs]))

  def observation(self, view: View) -> jax.Array:
    readings = view.sensordata
    inertial = [readings[where] for where in self._inertial]
    toes = [jnp.arcsinh(readings[where]) for where in self._toes]
    return jnp.concatenate(
      [
        view.qpos[_ROOT_QPOS:],
        view.qvel[_ROOT_QVEL:],
        view.act,
        readings[self._velocity],
        self._upright(view)[None],
        *inertial,
        *toes,
      ]
    )

  def reward(self, view: View) -> jax.Array:
    upright = jnp.clip((1.0 + self._upright(view)) / 2.0, 0.0, 1.0)
    speed = view.sensordata[self._velocity][0]
    return upright * jnp.clip((speed + self._speed) / (2.0 * self._speed), 0.0, 1.0)

  def _upright(self, view: View) -> jax.Array:
    return view.data.xmat[self._torso, 2, 2]


class _Outline:
  """The body's geoms in its default pose, in the frame of its root."""

  def __init__(self, model: mujoco.MjModel):
    data = mujoco.MjData(model)
    data.qpos[:_ROOT_QPOS] = [0, 0, 0, 1, 0, 0, 0]
    mujoco.mj_kinematics(model, data)
    geoms = np.flatnonzero(model.geom_bodyid != 0)
    self._type = model.geom_type[geoms]
    self._size = np.float32(model.geom_size[geoms])
    self._position = np.float32(data.geom_xpos[geoms])
    self._axes = np.float32(data.geom_xmat[geoms].reshape(-1, 3, 3))

  def depth(self, rotation: jax.Array) -> jax.Array:
    """How far the lowest point lies below the root, f32[], metres.

    Args:
      rotation: of the root, f32[3, 3].
    """
    # The third row of each geom's rotation: the vertical in the geom's frame.
    vertical = jnp.einsum("j,gjk->gk", rotation[2], self._axes)
    radius, half_length = self._size[:, 0], self._size[:, 1]
    along = jnp.abs(vertical[:, 2])
    across = jnp.sqrt(jnp.maximum(1.0 - along**2, 0.0))
    geom = mujoco.mjtGeom
    reach = jnp.select(
      [self._type == int(kind) for kind in (
        geom.mjGEOM_SPHERE, geom.mjGEOM_CAPSULE, geom.mjGEOM_CYLINDER,
        geom.mjGEOM_ELLIPSOID,
      )],
      [
        radius,
        radius + half_length * along,
        radius * across + half_length * along,
        jnp.linalg.norm(self._size * vertical, axis=-1),
      ],
    )  # fmt: skip
    return jnp.max(reach - self._position @ rotation[2])


TASKS = {
  "quadruped-run": functools.partial(Move, speed=5.0),
  "quadruped-walk": functools.partial(Move, speed=0.5),
}
