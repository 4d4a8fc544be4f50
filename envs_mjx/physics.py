"""MuJoCo's dynamics in JAX as dm_control steps them, over a small carried state.

Three things are dm_control's and easily lost in a port:

* A control step is n substeps. After it, everything that depends on position and
  velocity belongs to the new state, while readings of the acceleration stage (touch,
  force, torque, accelerometer) are those of the last substep: one substep old.
* At a reset every reading is fresh, with the actuators disabled.
* Rewards read the control as given; the dynamics clamp it to the actuator's range.

What a step needs of the state before it is small (`PhysicsState`); the full
`mjx.Data` exists only inside a control step.
"""

import copy
import enum
import warnings
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct
from mujoco import mjx
from mujoco.mjx._src import collision_driver

from envs_mjx import collision, dynamics
from envs_mjx.base import PhysicsState

# Newton iterations and line-search steps that gave the same one-step errors as
# MuJoCo's 100 and 50 on every model of the suite, at a fraction of their cost.
ITERATIONS = 15
LS_ITERATIONS = 8


class Stage(enum.IntEnum):
  """How much of the new state a task wants derived after a control step.

  STATE: nothing beyond qpos and qvel (observation and reward are closed forms).
  POSITION: body, geom and site poses, centres of mass, position-stage sensors.
  VELOCITY: that, and body velocities (`cvel`) and velocity-stage sensors.
  """

  STATE = 0
  POSITION = 1
  VELOCITY = 2


@struct.dataclass
class View:
  """What observations and rewards may read: the state after a control step.

  Attributes:
    qpos: f32[nq] generalised positions.
    qvel: f32[nv] generalised velocities.
    act: f32[na] actuator activations.
    ctrl: f32[nu] the control as given, not clamped (zero at a reset).
    sensordata: f32[nsensordata] readings; entries of stages that the task did not
      ask for are meaningless.
    data: the `mjx.Data` with the fields of the asked-for stage fresh.
    params: the task's parameters, as `Task.initialize` drew them.
  """

  qpos: jax.Array
  qvel: jax.Array
  act: jax.Array
  ctrl: jax.Array
  sensordata: jax.Array
  data: mjx.Data
  params: dict[str, jax.Array]


def load_model(
  xml: str,
  assets: dict[str, bytes],
  *,
  max_contacts: int | None = None,
  edit: Callable[[mujoco.MjSpec], None] | None = None,
) -> mujoco.MjModel:
  """Compiles one of dm_control's models with the settings that MJX needs.

  Args:
    xml: the model's XML, as `get_model_and_assets()` of a dm_control domain gives it.
    assets: included files by name, from the same place.
    max_contacts: K, contact slots per contact dimension; MJX keeps the K deepest.
      None keeps a slot for every contact that the geom pairs could make.
    edit: changes the specification before it is compiled.

  Returns:
    The compiled model. The energy flag, which MJX refuses and the motion does not
    depend on, is cleared.
  """
  spec = mujoco.MjSpec.from_string(xml, include=assets, assets=assets)
  if edit is not None:
    edit(spec)
  if max_contacts is not None:
    spec.add_numeric(name="max_contact_points", data=[float(max_contacts)], size=1)
  spec.option.iterations = ITERATIONS
  spec.option.ls_iterations = LS_ITERATIONS
  with warnings.catch_warnings():
    # Of attributes that dm_control's XML still uses.
    warnings.filterwarnings("ignore", message=".*is deprecated.*")
    model = spec.compile()
  model.opt.enableflags &= ~int(mujoco.mjtEnableBit.mjENBL_ENERGY)
  return model


class Physics:
  """Pure functions that step one model; every array is unbatched.

  Attributes:
    model: the compiled C model, as dm_control has it.
    stepped: the compiled C model that MJX steps, mostly the same.
    n_substeps: physics steps per control step.
    stage: what is derived of the new state after a control step.
    acceleration_sensors: whether readings of the acceleration stage are kept.
    is_acceleration: bool[nsensordata] readings of the acceleration stage.
    capped_slots: ranges of contact slots, one for each contact dimension that has
      fewer slots than contacts are possible.
  """

  def __init__(
    self,
    model: mujoco.MjModel,
    n_substeps: int,
    *,
    stage: Stage = Stage.STATE,
    acceleration_sensors: bool = False,
    stepped: mujoco.MjModel | None = None,
  ):
    """Puts a model on the default device.

    Args:
      model: a compiled model, see `load_model`.
      n_substeps: physics steps per control step.
      stage: what is derived of the new state after a control step.
      acceleration_sensors: whether readings of the acceleration stage are kept.
      stepped: the model that is stepped in place of `model`, where MJX needs or
        gains by a simpler one: with the same bodies, joints, actuators and sensors.
    """
    self.model = model
    self.n_substeps = n_substeps
    self.stage = stage
    self.acceleration_sensors = acceleration_sensors
    stepped = model if stepped is None else stepped
    self.stepped = stepped
    self._mjx_model = mjx.put_model(stepped, impl="jax")
    self._mjx_data = mjx.make_data(stepped, impl="jax")
    self.is_acceleration = np.asarray(
      model.sensor_needstage == mujoco.mjtStage.mjSTAGE_ACC
    ).repeat(model.sensor_dim)
    self.capped_slots = _capped_slots(stepped)

  @property
  def control_timestep(self) -> float:
    """Seconds in one control step."""
    return float(self.model.opt.timestep * self.n_substeps)

  def sensor(self, name: str) -> slice:
    """Returns where `sensordata` holds the sensor `name`."""
    sensor = self.model.sensor(name)
    return slice(int(sensor.adr[0]), int(sensor.adr[0] + sensor.dim[0]))

  def initial(
    self,
    qpos: jax.Array,
    qvel: jax.Array | None = None,
    act: jax.Array | None = None,
    qacc_warmstart: jax.Array | None = None,
  ) -> PhysicsState:
    """The state that a reset leaves: time 0, readings fresh, actuators disabled.

    Args:
      qpos: f32[nq].
      qvel: f32[nv], zero if None.
      act: f32[na], zero if None.
      qacc_warmstart: f32[nv], zero if None.
    """
    nv, na = self.model.nv, self.model.na

    def filled(value, size):
      return jnp.zeros(size, jnp.float32) if value is None else jnp.float32(value)

    state = PhysicsState(
      qpos=jnp.float32(qpos),
      qvel=filled(qvel, nv),
      act=filled(act, na),
      qacc_warmstart=filled(qacc_warmstart, nv),
      time=jnp.float32(0.0),
      sensordata=jnp.zeros(
        self.model.nsensordata if self.acceleration_sensors else 0, jnp.float32
      ),
    )
    if not self.acceleration_sensors:
      return state
    option = self._mjx_model.opt
    disabled = option.disableflags | mujoco.mjtDisableBit.mjDSBL_ACTUATION
    unactuated = self._mjx_model.replace(opt=option.replace(disableflags=disabled))
    data = self._data(state, jnp.zeros(self.model.nu, jnp.float32))
    with jax.default_matmul_precision("highest"), collision.corrections():
      data = dynamics.forward(unactuated, data)
    return state.replace(sensordata=data.sensordata)

  def touches(self, qpos: jax.Array) -> jax.Array:
    """Whether any two geoms that may collide touch at the positions f32[nq], bool[]."""
    data = self._mjx_data.replace(qpos=qpos)
    with jax.default_matmul_precision("highest"), collision.corrections():
      data = mjx.collision(self._mjx_model, mjx.kinematics(self._mjx_model, data))
    return jnp.any(data._impl.contact.dist <= 0.0)

  def control_step(
    self, state: PhysicsState, ctrl: jax.Array
  ) -> tuple[PhysicsState, jax.Array]:
    """Advances `n_substeps` under a constant control f32[nu].

    Returns:
      The new state, whose readings of the acceleration stage are one substep old,
      and i32[], the substeps in which every contact slot was active, so that an
      active contact may have been left out.
    """
    carry = (state, jnp.int32(0))
    if self.n_substeps == 1:
      return self._substep(carry, ctrl)
    return jax.lax.scan(
      lambda carry, _: (self._substep(carry, ctrl), None),
      carry,
      length=self.n_substeps,
    )[0]

  def view(
    self, state: PhysicsState, ctrl: jax.Array, params: dict[str, jax.Array]
  ) -> View:
    """Derives what the task asked for from a state, without a physics step."""
    data = self._data(state, ctrl)
    with jax.default_matmul_precision("highest"):
      if self.stage >= Stage.POSITION:
        data = _position_stage(self._mjx_model, data)
      if self.stage >= Stage.VELOCITY:
        data = _velocity_stage(self._mjx_model, data)
    sensordata = data.sensordata
    if self.acceleration_sensors:
      sensordata = jnp.where(self.is_acceleration, state.sensordata, sensordata)
    return View(
      qpos=state.qpos,
      qvel=state.qvel,
      act=state.act,
      ctrl=ctrl,
      sensordata=sensordata,
      data=data,
      params=params,
    )

  def _data(self, state: PhysicsState, ctrl: jax.Array) -> mjx.Data:
    fields = {
      "qpos": state.qpos,
      "qvel": state.qvel,
      "act": state.act,
      "qacc_warmstart": state.qacc_warmstart,
      "time": state.time,
      "ctrl": ctrl,
    }
    if self.acceleration_sensors:
      fields["sensordata"] = state.sensordata
    return self._mjx_data.replace(**fields)

  def _substep(self, carry, ctrl):
    state, overflow = carry
    with jax.default_matmul_precision("highest"), collision.corrections():
      data = dynamics.step(self._mjx_model, self._data(state, ctrl))
    state = PhysicsState(
      qpos=data.qpos,
      qvel=data.qvel,
      act=data.act,
      qacc_warmstart=data.qacc_warmstart,
      time=data.time,
      sensordata=data.sensordata if self.acceleration_sensors else state.sensordata,
    )
    return state, overflow + self._slots_full(data).astype(jnp.int32)

  def _slots_full(self, data: mjx.Data) -> jax.Array:
    full = jnp.bool_(False)
    for slots in self.capped_slots:
      contact = data._impl.contact
      active = contact.dist[slots] < contact.includemargin[slots]
      full |= jnp.all(active)
    return full


def only_colliding(
  model: mujoco.MjModel, names: Collection[str]
) -> mujoco.MjModel:
  """A copy of a model in which only the named geoms collide.

  For models that disable contacts, and where no others can touch.
  """
  keep = [model.geom(name).id for name in names]
  others = np.setdiff1d(np.arange(model.ngeom), keep)
  model = copy.copy(model)
  model.geom_contype[others] = 0
  model.geom_conaffinity[others] = 0
  return model


def _capped_slots(model: mujoco.MjModel) -> list[slice]:
  """Contact slots of each contact dimension that has fewer slots than contacts."""
  slots = np.asarray(collision_driver.make_condim(model))
  uncapped = np.asarray(collision_driver.make_condim(_without_cap(model)))
  ranges = []
  for dim in sorted(set(slots.tolist())):
    (where,) = np.nonzero(slots == dim)
    if where.size < np.count_nonzero(uncapped == dim):
      ranges.append(slice(int(where[0]), int(where[-1]) + 1))
  return ranges


def _without_cap(model: mujoco.MjModel) -> mujoco.MjModel:
  index = mujoco.mj_name2id(
    model, mujoco.mjtObj.mjOBJ_NUMERIC, "max_contact_points"
  )
  if index < 0:
    return model
  uncapped = copy.copy(model)
  uncapped.numeric_data[model.numeric_adr[index]] = -1
  return uncapped


def _position_stage(model: mjx.Model, data: mjx.Data) -> mjx.Data:
  data = mjx.kinematics(model, data)
  data = mjx.com_pos(model, data)
  data = mjx.tendon(model, data)
  data = mjx.transmission(model, data)
  return mjx.sensor_pos(model, data)


def _velocity_stage(model: mjx.Model, data: mjx.Data) -> mjx.Data:
  impl = data._impl
  data = data.tree_replace({
    "_impl.actuator_velocity": impl.actuator_moment @ data.qvel,
    "_impl.ten_velocity": impl.ten_J @ data.qvel,
  })
  data = mjx.com_vel(model, data)
  return mjx.sensor_vel(model, data)
