"""Hopper: a planar one-legged body that stands or hops."""

import functools

import jax
import jax.numpy as jnp

from envs_mjx import randomize, rewards
from envs_mjx.momentum import angular_momentum
from envs_mjx.physics import Physics, Stage, View, load_model
from envs_mjx.task import Start, Task

# Up to 5 contacts were seen at once under random and bang-bang actions.
_MAX_CONTACTS = 8
_N_SUBSTEPS = 4

_STAND_HEIGHT = 0.6  # of the torso's centre of mass above the foot's, metres
_FLIP_MOMENTUM = (2.5, 5.0)  # where the reward begins and is full, kg·m²/s


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import hopper

  model = load_model(*hopper.get_model_and_assets(), max_contacts=_MAX_CONTACTS)
  return Physics(model, _N_SUBSTEPS, stage=Stage.VELOCITY, acceleration_sensors=True)


class Hopper(Task):
  """Model, reset and observation of every hopper task."""

  obs_size = 15

  def __init__(self):
    self.physics = _physics()
    self._speed_index = self.physics.sensor("torso_subtreelinvel").start
    toe, heel = self.physics.sensor("touch_toe"), self.physics.sensor("touch_heel")
    self._touch_indices = jnp.array([toe.start, heel.start])
    self._torso = self.physics.model.body("torso").id
    self._foot = self.physics.model.body("foot").id

  def initialize(self, key: jax.Array) -> Start:
    return Start(randomize.limited_and_rotational_joints(key, self.physics.model))

  def observation(self, view: View) -> jax.Array:
    touch = jnp.log1p(view.sensordata[self._touch_indices])
    return jnp.concatenate([view.qpos[1:], view.qvel, touch])

  def speed(self, view: View) -> jax.Array:
    """Forward velocity of the whole body's centre of mass, m/s."""
    return view.sensordata[self._speed_index]

  def standing(self, view: View) -> jax.Array:
    """1 where the torso's centre of mass is high enough above the foot's."""
    com_height = view.data.xipos[:, 2]
    height = com_height[self._torso] - com_height[self._foot]
    return rewards.tolerance(height, (_STAND_HEIGHT, 2.0))


class Stand(Hopper):
  """Stands with little control."""

  def reward(self, view: View) -> jax.Array:
    effort = rewards.tolerance(
      view.ctrl, margin=1.0, sigmoid="quadratic", value_at_margin=0.0
    )
    return self.standing(view) * (4.0 + effort.mean()) / 5.0


class Hop(Hopper):
  """Stands and moves in one direction.

  Args:
    velocity: metres per second at which the reward is full, negative for backwards.
  """

  def __init__(self, velocity: float):
    super().__init__()
    self._velocity = velocity

  def reward(self, view: View) -> jax.Array:
    hopping = jnp.clip(self.speed(view) / self._velocity, 0.0, 1.0)
    return self.standing(view) * hopping


class Flip(Hopper):
  """Turns over itself.

  Args:
    backwards: the direction.
  """

  def __init__(self, backwards: bool):
    super().__init__()
    self._sign = -1.0 if backwards else 1.0

  def reward(self, view: View) -> jax.Array:
    momentum = angular_momentum(self.physics.model, view.data, self._torso)[1]
    start, full = _FLIP_MOMENTUM
    return jnp.clip((self._sign * momentum - start) / (full - start), 0.0, 1.0)


TASKS = {
  "hopper-flip": functools.partial(Flip, backwards=False),
  "hopper-flip-backwards": functools.partial(Flip, backwards=True),
  "hopper-stand": Stand,
  "hopper-hop": functools.partial(Hop, velocity=2.0),
  "hopper-hop-backwards": functools.partial(Hop, velocity=-1.0),
}
