"""Walker: a planar biped that stands, walks or runs."""

import functools

import jax
import jax.numpy as jnp

from envs_mjx import randomize, rewards
from envs_mjx.physics import Physics, Stage, View, load_model
from envs_mjx.task import Start, Task

# Up to 6 contacts were seen at once under random and bang-bang actions.
_MAX_CONTACTS = 10
_N_SUBSTEPS = 10

_TORSO_HEIGHT = 1.3  # of the torso's frame at qpos 0, metres
_STAND_HEIGHT = 1.2

# Unlike in other planar domains the vertical slide comes first in qpos.
_ROOTZ, _ROOTY = 0, 2


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import walker

  model = load_model(*walker.get_model_and_assets(), max_contacts=_MAX_CONTACTS)
  return Physics(model, _N_SUBSTEPS, stage=Stage.VELOCITY)


class Walker(Task):
  """Model, reset and observation of every walker task."""

  obs_size = 24

  def __init__(self):
    self.physics = _physics()
    self._speed_index = self.physics.sensor("torso_subtreelinvel").start

  def initialize(self, key: jax.Array) -> Start:
    return Start(randomize.limited_and_rotational_joints(key, self.physics.model))

  def observation(self, view: View) -> jax.Array:
    # Leg joints turn about -y: torso, then thigh, leg and foot of either side.
    pitch = view.qpos[_ROOTY]
    legs = pitch - jnp.cumsum(view.qpos[3:].reshape(2, 3), axis=1)
    angles = jnp.concatenate([pitch[None], legs.reshape(-1)])
    orientations = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1).reshape(-1)
    return jnp.concatenate([orientations, self.height(view)[None], view.qvel])

  def height(self, view: View) -> jax.Array:
    """Height of the torso's frame, metres."""
    return _TORSO_HEIGHT + view.qpos[_ROOTZ]

  def speed(self, view: View) -> jax.Array:
    """Forward velocity of the whole body's centre of mass, m/s."""
    return view.sensordata[self._speed_index]

  def moving(self, view: View, velocity: float) -> jax.Array:
    """1 at a velocity in m/s, negative for backwards, and 1/6 at rest."""
    return (5.0 * jnp.clip(self.speed(view) / velocity, 0.0, 1.0) + 1.0) / 6.0

  def standing(self, view: View) -> jax.Array:
    """1 where the torso is high and upright."""
    high = rewards.tolerance(
      self.height(view), (_STAND_HEIGHT, jnp.inf), margin=_STAND_HEIGHT / 2
    )
    upright = (1.0 + jnp.cos(view.qpos[_ROOTY])) / 2.0
    return (3.0 * high + upright) / 4.0


class Stand(Walker):
  """Stands, at any speed."""

  def reward(self, view: View) -> jax.Array:
    return self.standing(view)


class Move(Walker):
  """Stands and moves in one direction.

  Args:
    velocity: metres per second at which the reward is full, negative for backwards.
  """

  def __init__(self, velocity: float):
    super().__init__()
    self._velocity = velocity

  def reward(self, view: View) -> jax.Array:
    return self.standing(view) * self.moving(view, self._velocity)


TASKS = {
  "walker-stand": Stand,
  "walker-walk": functools.partial(Move, velocity=1.0),
  "walker-walk-backwards": functools.partial(Move, velocity=-1.0),
  "walker-run": functools.partial(Move, velocity=8.0),
  "walker-run-backwards": functools.partial(Move, velocity=-8.0),
}
