"""Cheetah: a planar two-legged animal that runs."""

import functools

import jax
import jax.numpy as jnp

from envs_mjx import randomize, rewards
from envs_mjx.physics import Physics, Stage, View, load_model
from envs_mjx.task import Start, Task

# Up to 6 contacts were seen at once under random and bang-bang actions.
_MAX_CONTACTS = 8
_SETTLING_SUBSTEPS = 200
_RUN_SPEED = 10.0  # m/s

_ROOTZ, _ROOTY = 1, 2


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import cheetah

  model = load_model(*cheetah.get_model_and_assets(), max_contacts=_MAX_CONTACTS)
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


class Run(Cheetah):
  """Reward proportional to the forward speed, up to 10 m/s."""

  def reward(self, view: View) -> jax.Array:
    return rewards.tolerance(
      self.speed(view),
      (_RUN_SPEED, jnp.inf),
      margin=_RUN_SPEED,
      sigmoid="linear",
      value_at_margin=0.0,
    )


TASKS = {"cheetah-run": Run}
