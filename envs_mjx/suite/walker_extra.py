"""Walker's custom tasks beyond the paper's: poses and flips."""

import jax
import jax.numpy as jnp

from envs_mjx import rewards
from envs_mjx.physics import View
from envs_mjx.suite.walker import Walker

# Heights of body frames, metres.
_LYING = 0.08  # of torso, thighs or a foot on the ground
_TORSO_RAISED = 1.0
_FEET_RAISED = 1.1
_THIGHS_RAISED = 1.0
_FLIP_SPEED = 6.0  # m/s


class Pose(Walker):
  """Heights that the poses are made of."""

  def above(self, height: jax.Array, bound: float) -> jax.Array:
    """1 at or above a height, falling over half of it below."""
    return rewards.tolerance(height, (bound, jnp.inf), margin=bound / 2)

  def below(self, height: jax.Array, bound: float, margin: float) -> jax.Array:
    """1 at or below a height."""
    return rewards.tolerance(height, (-jnp.inf, bound), margin=margin)

  def body_height(self, view: View, *bodies: str) -> jax.Array:
    """Mean height of body frames, metres."""
    ids = jnp.array([self.physics.model.body(name).id for name in bodies])
    return view.data.xpos[ids, 2].mean()

  def thighs(self, view: View) -> jax.Array:
    """Mean height of the thighs' frames, which lie at the hips."""
    return self.body_height(view, "right_thigh", "left_thigh")

  def feet(self, view: View) -> jax.Array:
    """Mean height of the feet's frames."""
    return self.body_height(view, "right_foot", "left_foot")

  def tilted(self, view: View) -> jax.Array:
    """0 upright, 1 upside down."""
    return (1.0 - jnp.cos(view.qpos[2])) / 2.0

  def lying(self, view: View) -> jax.Array:
    """1 where the torso is on the ground."""
    return self.below(self.height(view), _LYING, _LYING / 2)


class Arabesque(Pose):
  """Stands on the left foot with the right one raised and the torso low."""

  def reward(self, view: View) -> jax.Array:
    torso = self.above(self.height(view), _TORSO_RAISED)
    left = self.below(self.body_height(view, "left_foot"), _LYING, 0.5)
    right = self.above(self.body_height(view, "right_foot"), _TORSO_RAISED)
    return (3.0 * torso + left + right + self.tilted(view)) / 6.0


class LieDown(Pose):
  """Lies on the ground."""

  def reward(self, view: View) -> jax.Array:
    thighs = self.below(self.thighs(view), _LYING, _LYING / 2)
    return (3.0 * self.lying(view) + thighs + self.tilted(view)) / 5.0


class LegsUp(Pose):
  """Lies on the ground with the feet raised."""

  def reward(self, view: View) -> jax.Array:
    thighs = self.below(self.thighs(view), _LYING, _LYING / 2)
    feet = self.above(self.feet(view), _FEET_RAISED)
    total = 3.0 * self.lying(view) + 2.0 * feet + thighs + self.tilted(view)
    return total / 7.0


class HeadStand(Pose):
  """Raises feet and thighs."""

  def reward(self, view: View) -> jax.Array:
    feet = self.above(self.feet(view), _FEET_RAISED)
    return (3.0 * feet + 2.0 * self.above(self.thighs(view), _THIGHS_RAISED)) / 5.0


class Flip(HeadStand):
  """Moves forward with feet and thighs raised."""

  velocity = _FLIP_SPEED

  def reward(self, view: View) -> jax.Array:
    return super().reward(view) * self.moving(view, self.velocity)


class BackFlip(Flip):
  """Moves backward with feet and thighs raised."""

  velocity = -_FLIP_SPEED


TASKS = {
  "walker-arabesque": Arabesque,
  "walker-backflip": BackFlip,
  "walker-flip": Flip,
  "walker-headstand": HeadStand,
  "walker-legs-up": LegsUp,
  "walker-lie-down": LieDown,
}
