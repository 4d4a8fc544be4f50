"""Pendulum: a torque too weak to lift the pole directly must swing it up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from envs_mjx import rewards
from envs_mjx.physics import Physics, View, load_model
from envs_mjx.task import Start, Task

_UPRIGHT_COSINE = float(np.cos(np.deg2rad(8.0)))
_SPIN_SPEED = 9.0  # rad/s at which the reward is full


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import pendulum

  return Physics(load_model(*pendulum.get_model_and_assets()), n_substeps=1)


class Pendulum(Task):
  """Model, reset and observation of every pendulum task."""

  obs_size = 3

  def __init__(self):
    self.physics = _physics()

  def initialize(self, key: jax.Array) -> Start:
    return Start(qpos=jax.random.uniform(key, (1,), minval=-jnp.pi, maxval=jnp.pi))

  def observation(self, view: View) -> jax.Array:
    angle = view.qpos[0]
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), view.qvel[0]])


class SwingUp(Pendulum):
  """Reward 1 while the pole is within 8 degrees of upright."""

  def reward(self, view: View) -> jax.Array:
    return rewards.tolerance(jnp.cos(view.qpos[0]), (_UPRIGHT_COSINE, 1.0))


class Spin(Pendulum):
  """Reward proportional to the speed of rotation, in either direction."""

  def reward(self, view: View) -> jax.Array:
    return jnp.minimum(jnp.abs(view.qvel[0]) / _SPIN_SPEED, 1.0)


TASKS = {"pendulum-swingup": SwingUp, "pendulum-spin": Spin}
