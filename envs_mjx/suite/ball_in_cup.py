"""Ball in cup: catch a ball on a string with a planar cup."""

import functools

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from envs_mjx.physics import Physics, View, load_model
from envs_mjx.task import Start, Task

# Up to 3 contacts were seen at once under random and bang-bang actions.
_MAX_CONTACTS = 4
_N_SUBSTEPS = 10

# Proposals of ball_x and ball_z, metres; a draw is rejected where the ball touches.
_BALL_LOW = (-0.2, 0.2)
_BALL_HIGH = (0.2, 0.5)
# A draw is rejected with probability 0.173: all of these are with 2e-10. The last is
# then taken as it is.
_MAX_DRAWS = 13


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


def first_accepted(candidates: jax.Array, accepted: jax.Array) -> jax.Array:
  """Returns the first of f32[N, ...] that bool[N] accepts, the last if it does none."""
  return candidates[jnp.argmax(accepted.at[-1].set(True))]


class Catch(BallInCup):
  """Reward 1 while the ball is in the cup."""

  def initialize(self, key: jax.Array) -> Start:
    low, high = jnp.array(_BALL_LOW), jnp.array(_BALL_HIGH)
    balls = low + (high - low) * jax.random.uniform(key, (_MAX_DRAWS, 2))
    ball = first_accepted(balls, ~self.touches_cup(balls))
    return Start(qpos=jnp.concatenate([jnp.zeros(2), ball]))

  def reward(self, view: View) -> jax.Array:
    return self.in_target(view.qpos)


TASKS = {"cup-catch": Catch}
