"""Cheetah: a planar two-legged animal that runs."""

import functools

import jax
import jax.numpy as jnp
import mujoco

from envs_mjx import randomize, rewards
from envs_mjx.physics import Physics, Stage, View, load_model
from envs_mjx.task import Start, Task

# Up to 6 contacts were seen at once under random and bang-bang actions.
_MAX_CONTACTS = 8
_SETTLING_SUBSTEPS = 200
_TOTAL_MASS = 14.0  # kg; the XML's masses are scaled to it

_HIGH = 1.2  # metres
_UPRIGHT_SPEED = 6.0  # m/s

_ROOTZ, _ROOTY = 1, 2


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import cheetah

  def keep_masses(spec):
    spec.compiler.settotalmass = -1  # MuJoCo's compiler warns that it will drop this

  model = load_model(
    *cheetah.get_model_and_assets(), max_contacts=_MAX_CONTACTS, edit=keep_masses
  )
  mujoco.mj_setTotalmass(model, _TOTAL_MASS)
  mujoco.mj_setConst(model, mujoco.MjData(model))
  return Physics(model, n_substeps=1, stage=Stage.VELOCITY)


class Cheetah(Task):
  """Model, reset and observation of every cheetah task."""

  obs_size = 17

  def __init__(self):
    self.physics = _physics()
    self._speed_index = self.physics.sensor("torso_subtreelinvel").start

  def initialize(self, key: jax.Array) -> Start:
    """Draws the leg joints and lets the body fall and settle for two seconds."""
    return self.settle(randomize.limited_and_rotational_joints(key, self.physics.model))

  def settle(self, qpos: jax.Array) -> Start:
    """The state after dm_control's settling from a pose f32[9].

    Roots stay at zero. dm_control's first settling substep uses accelerations that
    were computed before the joints were drawn: those of the default pose, which
    touches nothing and strains no spring, so that it is a free fall. The other
    substeps are ordinary ones without control.
    """
    model = self.physics.model
    timestep, gravity = model.opt.timestep, model.opt.gravity[2]
    fall = jnp.zeros(model.nv).at[_ROOTZ].set(1.0)
    qpos = qpos.at[: _ROOTY + 1].set(0.0)
    state = self.physics.initial(
      qpos=qpos + timestep**2 * gravity * fall,
      qvel=timestep * gravity * fall,
      qacc_warmstart=gravity * fall,
    )
    ctrl = jnp.zeros(model.nu)
    state, _ = jax.lax.scan(
      lambda state, _: (self.physics.control_step(state, ctrl)[0], None),
      state,
      length=_SETTLING_SUBSTEPS - 1,
    )
    return Start(state.qpos, state.qvel, qacc_warmstart=state.qacc_warmstart)

  def observation(self, view: View) -> jax.Array:
    return jnp.concatenate([view.qpos[1:], view.qvel])

  def speed(self, view: View) -> jax.Array:
    """Forward velocity of the whole body's centre of mass, m/s."""
    return view.sensordata[self._speed_index]

  def standing_still(self, view: View, raised_foot: str) -> jax.Array:
    """1 in place with the torso and one foot high."""
    height = (self.height(view, "torso") + self.height(view, raised_foot)) / 2.0
    still = jnp.clip(2.0 - 2.0 * jnp.abs(self.speed(view)), 0.0, 1.0)
    return (5.0 * is_high(height) + still) / 6.0

  def height(self, view: View, body: str) -> jax.Array:
    """Height of a body's frame, metres; a foot's frame is its ankle."""
    return view.data.xpos[self.physics.model.body(body).id, 2]


class Run(Cheetah):
  """Reward proportional to the speed in one direction.

  Args:
    velocity: metres per second at which the reward is full, negative for backwards.
  """

  def __init__(self, velocity: float):
    super().__init__()
    self._velocity = velocity

  def reward(self, view: View) -> jax.Array:
    return jnp.clip(self.speed(view) / self._velocity, 0.0, 1.0)


class RunUpright(Cheetah):
  """Runs forward with the torso and one foot high: on the other leg.

  Args:
    raised_foot: "bfoot" to run on the front leg, "ffoot" to run on the back leg.
  """

  def __init__(self, raised_foot: str):
    super().__init__()
    self._raised_foot = raised_foot

  def reward(self, view: View) -> jax.Array:
    foot, torso = self.height(view, self._raised_foot), self.height(view, "torso")
    upright = (3.0 * is_high(foot) + 2.0 * is_high(torso)) / 5.0
    moving = jnp.clip(self.speed(view) / _UPRIGHT_SPEED, 0.0, 1.0)
    return upright * (5.0 * moving + 1.0) / 6.0


class Jump(Cheetah):
  """Lifts the torso and both feet off the ground, in place."""

  def reward(self, view: View) -> jax.Array:
    return sum(self.standing_still(view, foot) for foot in ("bfoot", "ffoot")) / 2.0


def is_high(height: jax.Array) -> jax.Array:
  """1 at or above 1.2 m, falling over half of it below."""
  return rewards.tolerance(height, (_HIGH, jnp.inf), margin=_HIGH / 2)


TASKS = {
  "cheetah-jump": Jump,
  "cheetah-run": functools.partial(Run, velocity=10.0),
  "cheetah-run-back": functools.partial(RunUpright, raised_foot="ffoot"),
  "cheetah-run-backwards": functools.partial(Run, velocity=-8.0),
  "cheetah-run-front": functools.partial(RunUpright, raised_foot="bfoot"),
}
