"""Humanoid: a three-dimensional body with 21 joints stands, walks or runs."""

import functools

import jax
import jax.numpy as jnp

from envs_mjx import randomize, rewards
from envs_mjx.physics import Physics, Stage, View, load_model
from envs_mjx.task import Start, Task

# Up to 12 contacts were seen at once under random actions.
_MAX_CONTACTS = 24
_N_SUBSTEPS = 5
# A drawn pose touches itself with probability 0.256, all of these with 3e-10.
_MAX_DRAWS = 16

_STAND_HEIGHT = 1.4  # of the head, metres
_ROOT_QPOS = 7
_EXTREMITIES = ("left_hand", "left_foot", "right_hand", "right_foot")


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import humanoid

  model = load_model(*humanoid.get_model_and_assets(), max_contacts=_MAX_CONTACTS)
  return Physics(model, _N_SUBSTEPS, stage=Stage.VELOCITY)


class Humanoid(Task):
  """Model, reset and observation of every humanoid task."""

  obs_size = 67

  def __init__(self):
    self.physics = _physics()
    body = self.physics.model.body
    self._head, self._torso = body("head").id, body("torso").id
    self._extremities = jnp.array([body(name).id for name in _EXTREMITIES])
    self._velocity = self.physics.sensor("torso_subtreelinvel")

  def initialize(self, key: jax.Array) -> Start:
    """Draws orientation and joints, in the air, such that nothing touches."""
    draw = functools.partial(
      randomize.limited_and_rotational_joints, model=self.physics.model
    )
    qpos = jax.vmap(draw)(jax.random.split(key, _MAX_DRAWS))
    free = ~jax.vmap(self.physics.touches)(qpos)
    return Start(randomize.first_accepted(qpos, free))

  def observation(self, view: View) -> jax.Array:
    positions = view.data.xpos
    torso = view.data.xmat[self._torso]
    extremities = (positions[self._extremities] - positions[self._torso]) @ torso
    return jnp.concatenate(
      [
        view.qpos[_ROOT_QPOS:],
        positions[self._head, 2:],
        extremities.ravel(),
        torso[2],
        self.velocity(view),
        view.qvel,
      ]
    )

  def velocity(self, view: View) -> jax.Array:
    """Velocity f32[3] of the whole body's centre of mass in the world, m/s."""
    return view.sensordata[self._velocity]

  def standing(self, view: View) -> jax.Array:
    """How well it stands upright with little control."""
    height = view.data.xpos[self._head, 2]
    upright = view.data.xmat[self._torso, 2, 2]
    effort = rewards.tolerance(
      view.ctrl, margin=1.0, sigmoid="quadratic", value_at_margin=0.0
    )
    high = rewards.tolerance(
      height, (_STAND_HEIGHT, jnp.inf), margin=_STAND_HEIGHT / 4
    )
    upright = rewards.tolerance(
      upright, (0.9, jnp.inf), margin=1.9, sigmoid="linear", value_at_margin=0.0
    )
    return high * upright * (4.0 + effort.mean()) / 5.0


class Stand(Humanoid):
  """Stands still."""

  def reward(self, view: View) -> jax.Array:
    still = rewards.tolerance(self.velocity(view)[:2], margin=2.0).mean()
    return self.standing(view) * still


class Move(Humanoid):
  """Stands and moves in any horizontal direction.

  Args:
    speed: metres per second at which the reward is full.
  """

  def __init__(self, speed: float):
    super().__init__()
    self._speed = speed

  def reward(self, view: View) -> jax.Array:
    speed = jnp.linalg.norm(self.velocity(view)[:2])
    moving = jnp.clip(speed / self._speed, 0.0, 1.0)
    return self.standing(view) * (5.0 * moving + 1.0) / 6.0


TASKS = {
  "humanoid-run": functools.partial(Move, speed=10.0),
  "humanoid-stand": Stand,
  "humanoid-walk": functools.partial(Move, speed=1.0),
}
