"""Acrobot: two links, driven at the elbow only, swing up and balance."""

import functools

import jax
import jax.numpy as jnp

from envs_mjx import rewards
from envs_mjx.physics import Physics, View, load_model
from envs_mjx.task import Start, Task

_REACH = 2.0  # metres from the shoulder to the tip of the stretched arm: the target
_TARGET_RADIUS = 0.2


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import acrobot

  return Physics(load_model(*acrobot.get_model_and_assets()), n_substeps=1)


class SwingUp(Task):
  """Brings the tip of the lower link to the target above the shoulder.

  Args:
    sparse: reward 1 only within the target, instead of a smooth reward.
  """

  obs_size = 6

  def __init__(self, sparse: bool):
    self.physics = _physics()
    self._margin = 0.0 if sparse else 1.0

  def initialize(self, key: jax.Array) -> Start:
    return Start(qpos=jax.random.uniform(key, (2,), minval=-jnp.pi, maxval=jnp.pi))

  def observation(self, view: View) -> jax.Array:
    angles = jnp.cumsum(view.qpos)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles), view.qvel])

  def reward(self, view: View) -> jax.Array:
    angles = jnp.cumsum(view.qpos)
    offset = jnp.stack([jnp.sin(angles).sum(), jnp.cos(angles).sum() - _REACH])
    return rewards.tolerance(
      jnp.linalg.norm(offset), (0.0, _TARGET_RADIUS), margin=self._margin
    )


TASKS = {
  "acrobot-swingup": functools.partial(SwingUp, sparse=False),
  "acrobot-swingup-sparse": functools.partial(SwingUp, sparse=True),
}
