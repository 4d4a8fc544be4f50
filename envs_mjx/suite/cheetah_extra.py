"""Cheetah's custom tasks beyond the paper's: poses and flips."""

import functools

import jax
import jax.numpy as jnp

from envs_mjx import rewards
from envs_mjx.momentum import angular_momentum
from envs_mjx.physics import View
from envs_mjx.suite.cheetah import Cheetah, is_high

_LYING = 0.25  # height of body frames, metres
_FLIP_MOMENTUM = 8.0  # kg·m²/s


class Stand(Cheetah):
  """Stands still on one leg.

  Args:
    raised_foot: "bfoot" to stand on the front leg, "ffoot" to stand on the back leg.
  """

  def __init__(self, raised_foot: str):
    super().__init__()
    self._raised_foot = raised_foot

  def reward(self, view: View) -> jax.Array:
    return self.standing_still(view, self._raised_foot)


class LieDown(Cheetah):
  """Lies flat on the ground."""

  def reward(self, view: View) -> jax.Array:
    feet = (self.height(view, "ffoot") + self.height(view, "bfoot")) / 2.0
    return (3.0 * _is_low(self.height(view, "torso")) + _is_low(feet)) / 4.0


class LegsUp(Cheetah):
  """Lies on its back with the back foot raised."""

  def reward(self, view: View) -> jax.Array:
    torso, foot = self.height(view, "torso"), self.height(view, "bfoot")
    low = rewards.tolerance(torso, (-jnp.inf, _LYING), margin=_LYING / 2)
    upright = (3.0 * is_high(foot) + 2.0 * is_high(torso)) / 5.0
    return (5.0 * low + upright) / 6.0


class Flip(Cheetah):
  """Turns over itself while it moves.

  Args:
    velocity: metres per second at which that part of the reward is full, negative for
      backwards.
  """

  def __init__(self, velocity: float):
    super().__init__()
    self._velocity = velocity
    self._torso = self.physics.model.body("torso").id

  def reward(self, view: View) -> jax.Array:
    momentum = angular_momentum(self.physics.model, view.data, self._torso)[1]
    full = jnp.copysign(_FLIP_MOMENTUM, self._velocity)
    turning = jnp.clip(momentum / full, 0.0, 1.0)
    moving = jnp.clip(self.speed(view) / self._velocity, 0.0, 1.0)
    return (2.0 * turning + moving) / 3.0


def _is_low(height: jax.Array) -> jax.Array:
  return jnp.clip(2.0 - height / _LYING, 0.0, 1.0)


TASKS = {
  "cheetah-flip": functools.partial(Flip, velocity=10.0),
  "cheetah-flip-backwards": functools.partial(Flip, velocity=-8.0),
  "cheetah-legs-up": LegsUp,
  "cheetah-lie-down": LieDown,
  "cheetah-stand-back": functools.partial(Stand, raised_foot="ffoot"),
  "cheetah-stand-front": functools.partial(Stand, raised_foot="bfoot"),
}
