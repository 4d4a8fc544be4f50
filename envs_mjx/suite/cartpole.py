"""Cartpole: balance a pole on a cart, or swing it up first."""

import functools

import jax
import jax.numpy as jnp

from envs_mjx import rewards
from envs_mjx.physics import Physics, View, load_model
from envs_mjx.task import Start, Task


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import cartpole

  return Physics(load_model(*cartpole.get_model_and_assets()), n_substeps=1)


class Balance(Task):
  """Keeps the pole upright and the cart central.

  Args:
    swing_up: episodes start with the pole hanging instead of near upright.
    sparse: reward 1 only near the goal, instead of a smooth reward.
  """

  obs_size = 5

  def __init__(self, swing_up: bool, sparse: bool):
    self.physics = _physics()
    self._swing_up = swing_up
    self._sparse = sparse

  def initialize(self, key: jax.Array) -> Start:
    position_key, velocity_key = jax.random.split(key)
    if self._swing_up:
      qpos = 0.01 * jax.random.normal(position_key, (2,)) + jnp.array([0.0, jnp.pi])
    else:
      reach = jnp.array([0.1, 0.034])
      qpos = reach * jax.random.uniform(position_key, (2,), minval=-1.0, maxval=1.0)
    return Start(qpos=qpos, qvel=0.01 * jax.random.normal(velocity_key, (2,)))

  def observation(self, view: View) -> jax.Array:
    cart, angle = view.qpos
    return jnp.concatenate(
      [jnp.stack([cart, jnp.cos(angle), jnp.sin(angle)]), view.qvel]
    )

  def reward(self, view: View) -> jax.Array:
    cart, cosine = view.qpos[0], jnp.cos(view.qpos[1])
    if self._sparse:
      in_range = rewards.tolerance(cart, (-0.25, 0.25))
      return in_range * rewards.tolerance(cosine, (0.995, 1.0))
    upright = (1.0 + cosine) / 2.0
    centered = (1.0 + rewards.tolerance(cart, margin=2.0)) / 2.0
    effort = rewards.tolerance(
      view.ctrl[0], margin=1.0, sigmoid="quadratic", value_at_margin=0.0
    )
    slow = (1.0 + rewards.tolerance(view.qvel[1], margin=5.0)) / 2.0
    return upright * centered * (4.0 + effort) / 5.0 * slow


TASKS = {
  "cartpole-balance": functools.partial(Balance, swing_up=False, sparse=False),
  "cartpole-balance-sparse": functools.partial(Balance, swing_up=False, sparse=True),
  "cartpole-swingup": functools.partial(Balance, swing_up=True, sparse=False),
  "cartpole-swingup-sparse": functools.partial(Balance, swing_up=True, sparse=True),
}
