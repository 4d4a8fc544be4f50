"""Ball in cup: catch a ball on a string with a planar cup."""

import functools

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from envs_mjx import randomize
from envs_mjx.physics import Physics, View, load_model
from envs_mjx.task import Start, Task

# Up to 3 contacts were seen at once under random and bang-bang actions.
_MAX_CONTACTS = 4
_N_SUBSTEPS = 10

# Where ball_x and ball_z are drawn, metres: lowest and highest corner. Draws in which
# the ball touches the cup are rejected.
_ANYWHERE = ((-0.2, 0.2), (0.2, 0.5))
# Holds all positions that are in the target and free of the cup. dm_control rejects
# draws from everywhere until one is; this is the same distribution at 1/80 the cost.
_IN_CUP = ((-0.017, 0.333), (0.017, 0.375))
# A draw is rejected with probability 0.173 anywhere and 0.024 in the cup, so that all
# of these are with probability 2e-10. The last is then taken as it is.
_MAX_DRAWS = 13

_SPIN_STARTS_ANYWHERE = 0.1  # probability
_SPIN_DISTANCE = 0.5  # metres
_SPIN_SPEED = 6.0  # m/s


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import ball_in_cup

  model = load_model(*ball_in_cup.get_model_and_assets(), max_contacts=_MAX_CONTACTS)
  return Physics(model, _N_SUBSTEPS)


class BallInCup(Task):
  """Model and observation of every task with the ball and the cup."""

  obs_size = 8

  def __init__(self):
    self.physics = _physics()
    model = self.physics.model
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    parts = [g for g in range(model.ngeom) if model.geom(g).name.startswith("cup_part")]
    axes = data.geom_xmat[parts].reshape(-1, 3, 3)[:, :, 2]
    reach = axes * model.geom_size[parts, 1:2]
    # Ends of the cup's capsules in the plane (x, z), with the cup at its origin.
    self._cup_start = np.float32(data.geom_xpos[parts] - reach)[:, [0, 2]]
    self._cup_end = np.float32(data.geom_xpos[parts] + reach)[:, [0, 2]]
    ball_radius = model.geom("ball").size[0]
    self._touch_distance = np.float32(model.geom_size[parts[0], 0] + ball_radius)
    self._ball_origin = np.float32(model.body("ball").pos[[0, 2]])
    target = model.site("target")
    self._target_origin = np.float32(model.body("cup").pos + target.pos)[[0, 2]]
    self._target_reach = np.float32(target.size[[0, 2]] - ball_radius)

  def observation(self, view: View) -> jax.Array:
    return jnp.concatenate([view.qpos, view.qvel])

  def draw_ball(self, key: jax.Array, box) -> jax.Array:
    """Draws ball joints f32[2] within a box, such that the ball touches nothing."""
    low, high = jnp.array(box)
    balls = low + (high - low) * jax.random.uniform(key, (_MAX_DRAWS, 2))
    return randomize.first_accepted(balls, ~self.touches_cup(balls))

  def start(self, ball: jax.Array) -> Start:
    """Begins with the cup at its origin and the ball's joints f32[2]."""
    return Start(qpos=jnp.concatenate([jnp.zeros(2), ball]))

  def touches_cup(self, ball: jax.Array) -> jax.Array:
    """Whether a ball with joints f32[..., 2] touches the cup at its origin."""
    center = (self._ball_origin + ball)[..., None, :]
    part = self._cup_end - self._cup_start
    along = jnp.sum((center - self._cup_start) * part, axis=-1)
    along = jnp.clip(along / np.sum(part * part, axis=-1), 0.0, 1.0)
    offset = center - self._cup_start - along[..., None] * part
    squared = jnp.sum(offset * offset, axis=-1)
    return jnp.any(squared < self._touch_distance**2, axis=-1)

  def to_target(self, qpos: jax.Array) -> jax.Array:
    """Vector f32[2] in (x, z) from the ball to the middle of the cup, metres."""
    cup, ball = qpos[:2], qpos[2:]
    return self._target_origin + cup - (self._ball_origin + ball)

  def in_target(self, qpos: jax.Array) -> jax.Array:
    """1 where the whole ball is within the target box in the cup, else 0."""
    inside = jnp.all(jnp.abs(self.to_target(qpos)) < self._target_reach)
    return inside.astype(jnp.float32)


class Catch(BallInCup):
  """Reward 1 while the ball is in the cup; it starts around the cup."""

  def initialize(self, key: jax.Array) -> Start:
    return self.start(self.draw_ball(key, _ANYWHERE))

  def reward(self, view: View) -> jax.Array:
    return self.in_target(view.qpos)


class Spin(BallInCup):
  """Swings the ball fast and far from the cup; it starts in the cup mostly."""

  def initialize(self, key: jax.Array) -> Start:
    anywhere_key, cup_key, choice_key = jax.random.split(key, 3)
    ball = jnp.where(
      jax.random.uniform(choice_key) < _SPIN_STARTS_ANYWHERE,
      self.draw_ball(anywhere_key, _ANYWHERE),
      self.draw_ball(cup_key, _IN_CUP),
    )
    return self.start(ball)

  def reward(self, view: View) -> jax.Array:
    distance = jnp.linalg.norm(self.to_target(view.qpos))
    speed = jnp.linalg.norm(view.qvel[2:])
    far = jnp.minimum(distance / _SPIN_DISTANCE, 1.0)
    fast = jnp.minimum(speed / _SPIN_SPEED, 1.0)
    return (1.0 - self.in_target(view.qpos)) * (far + 2.0 * fast) / 3.0


TASKS = {"cup-catch": Catch, "cup-spin": Spin}
