"""Dog: a body with 73 joints stands, walks, trots or runs."""

import functools

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from envs_mjx import rewards
from envs_mjx.physics import ITERATIONS, LS_ITERATIONS, Physics, Stage, View, load_model
from envs_mjx.task import Start, Task

_MAX_CONTACTS = 32  # 99 % of states have fewer than 20 of one kind
_N_SUBSTEPS = 3
_ROOT_QPOS, _ROOT_QVEL = 7, 6

_STAND_HEIGHT = 0.9  # of the default pose's height
_UPRIGHT_COSINE = float(np.cos(np.deg2rad(30.0)))
_START_SPEED = 2.0  # deviation, m/s and rad/s

_UPRIGHT_BODIES = ("skull", "torso", "pelvis")
_INERTIAL = ("accelerometer", "velocimeter", "gyro")
_FORCES = ("foot_L", "foot_R", "hand_L", "hand_R")
_TOUCH = ("palm_L", "palm_R", "sole_L", "sole_R")

# Bits of the simplified model's contact masks.
_BODY, _FLOOR, _SKULL, _TORSO = 1, 2, 4, 8


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import dog

  # The size of the floor, in which the tasks' models differ, is for rendering only.
  xml, assets = dog.get_model_and_assets()
  model = load_model(xml, assets)
  return Physics(
    model,
    _N_SUBSTEPS,
    stage=Stage.VELOCITY,
    acceleration_sensors=True,
    stepped=_simplified(xml, assets, model),
  )


def _simplified(xml, assets, model: mujoco.MjModel) -> mujoco.MjModel:
  """The model without what MJX cannot collide and what cannot collide at all.

  Bones and other geoms that never touch are dropped after their masses were counted.
  Teeth touch the floor only, with three friction dimensions for six. The ellipsoids of
  skull and torso touch everything but boxes and each other.
  """
  spec = mujoco.MjSpec.from_string(xml, include=assets, assets=assets)
  twin = spec.compile()  # Gives the elements their numbers.
  for body in spec.bodies[1:]:
    body.explicitinertial = True
    body.mass = model.body_mass[body.id]
    body.ipos = model.body_ipos[body.id]
    body.iquat = model.body_iquat[body.id]
    body.inertia = model.body_inertia[body.id]
  ellipsoid, box = mujoco.mjtGeom.mjGEOM_ELLIPSOID, mujoco.mjtGeom.mjGEOM_BOX
  # Numbers change with every deletion.
  for index, geom in [(geom.id, geom) for geom in spec.geoms]:
    affine = int(twin.geom_conaffinity[index])
    if not twin.geom_contype[index] and not affine:
      spec.delete(geom)
    elif geom.name == "floor":
      geom.contype, geom.conaffinity = _FLOOR, 0
    elif geom.type == ellipsoid and geom.name == "collision_torso":
      geom.contype, geom.conaffinity = _TORSO, _FLOOR
    elif geom.type == ellipsoid and geom.name == "skull0_collision":
      geom.contype, geom.conaffinity = _SKULL, _SKULL | _FLOOR
    elif geom.type == ellipsoid:  # a tooth
      geom.contype, geom.conaffinity, geom.condim = 0, _FLOOR, 3
    elif geom.type == box:
      geom.contype, geom.conaffinity = _BODY, affine * _BODY | _FLOOR
    else:
      geom.contype = _BODY | _SKULL
      geom.conaffinity = affine * (_BODY | _SKULL | _TORSO) | _FLOOR
  for element in [*spec.skins, *spec.meshes]:
    spec.delete(element)
  spec.add_numeric(name="max_contact_points", data=[float(_MAX_CONTACTS)], size=1)
  spec.option.iterations, spec.option.ls_iterations = ITERATIONS, LS_ITERATIONS
  spec.option.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
  spec.option.noslip_iterations = 0  # MJX has no such solver.
  return spec.compile()


class Stand(Task):
  """Stands upright on its feet."""

  obs_size = 223

  def __init__(self):
    self.physics = _physics()
    model = self.physics.model
    body = model.body
    self._torso = body("torso").id
    self._heights = jnp.array([body("torso").id, body("pelvis").id])
    self._upright = jnp.array([body(name).id for name in _UPRIGHT_BODIES])
    self._velocity = self.physics.sensor("torso_linvel")
    self._inertial, self._forces, self._touch = (
      [self.physics.sensor(name) for name in names]
      for names in (_INERTIAL, _FORCES, _TOUCH)
    )
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    self._stand_height = np.float32(_STAND_HEIGHT * data.xpos[self._heights, 2])
    self._weight = float(-model.opt.gravity[2] * model.body_subtreemass[self._torso])

  def initialize(self, key: jax.Array) -> Start:
    """Turns the default pose, gives it a push and tenses the muscles at random."""
    model = self.physics.model
    azimuth_key, velocity_key, act_key = jax.random.split(key, 3)
    half = 0.5 * jax.random.uniform(azimuth_key, maxval=2.0 * jnp.pi)
    zero = jnp.zeros(())
    quaternion = jnp.stack([jnp.cos(half), zero, zero, jnp.sin(half)])
    push = _START_SPEED * jax.random.normal(velocity_key, (3,))
    low, high = jnp.float32(model.actuator_ctrlrange.T)
    return Start(
      qpos=jnp.float32(model.qpos0).at[3:_ROOT_QPOS].set(quaternion),
      qvel=jnp.zeros(model.nv).at[jnp.array([0, 1, 5])].set(push),
      act=low + (high - low) * jax.random.uniform(act_key, (model.na,)),
    )

  def observation(self, view: View) -> jax.Array:
    data = view.data

    def readings(where):
      return [view.sensordata[index] for index in where]

    return jnp.concatenate(
      [
        view.qpos[_ROOT_QPOS:],
        view.qvel[_ROOT_QVEL:],
        data.xpos[self._heights, 2],
        data.xmat[self._upright, 2].ravel(),
        self.velocity(view),
        *readings(self._inertial),
        *readings(self._forces),
        *readings(self._touch),
        view.act,
      ]
    )

  def velocity(self, view: View) -> jax.Array:
    """Velocity f32[3] of the whole body's centre of mass in the torso's frame, m/s."""
    return view.sensordata[self._velocity] @ view.data.xmat[self._torso]

  def reward(self, view: View) -> jax.Array:
    height = view.data.xpos[self._heights, 2] / self._stand_height
    high = rewards.tolerance(height, (1.0, jnp.inf), margin=1.0)
    upright = rewards.tolerance(
      view.data.xmat[self._upright, 2, 2],
      (_UPRIGHT_COSINE, jnp.inf),
      margin=_UPRIGHT_COSINE + 1.0,
      sigmoid="linear",
      value_at_margin=0.0,
    )
    load = sum(view.sensordata[index][0] for index in self._touch)
    on_feet = rewards.tolerance(
      load,
      (self._weight, jnp.inf),
      margin=self._weight,
      sigmoid="linear",
      value_at_margin=0.9,
    )
    return jnp.prod(high) * jnp.prod(upright) * on_feet


class Move(Stand):
  """Stands and moves forward, not much faster than it should.

  Args:
    speed: metres per second from which the reward is full, up to twice as much.
  """

  def __init__(self, speed: float):
    super().__init__()
    self._speed = speed

  def reward(self, view: View) -> jax.Array:
    forward = rewards.tolerance(
      self.velocity(view)[0],
      (self._speed, 2.0 * self._speed),
      margin=max(1.0, self._speed),
      sigmoid="linear",
      value_at_margin=0.0,
    )
    return super().reward(view) * (4.0 * forward + 1.0) / 5.0


TASKS = {
  "dog-run": functools.partial(Move, speed=9.0),
  "dog-stand": Stand,
  "dog-trot": functools.partial(Move, speed=3.0),
  "dog-walk": functools.partial(Move, speed=1.0),
}
