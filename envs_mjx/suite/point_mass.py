"""Point mass: a body that slides in the plane is pushed to the centre."""

import functools

import jax
import jax.numpy as jnp

from envs_mjx import randomize, rewards
from envs_mjx.physics import Physics, View, load_model
from envs_mjx.task import Start, Task

_TARGET_RADIUS = 0.015  # metres


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import point_mass

  return Physics(load_model(*point_mass.get_model_and_assets()), n_substeps=1)


class Easy(Task):
  """Rests on the target, with little control."""

  obs_size = 4

  def __init__(self):
    self.physics = _physics()

  def initialize(self, key: jax.Array) -> Start:
    return Start(randomize.limited_and_rotational_joints(key, self.physics.model))

  def observation(self, view: View) -> jax.Array:
    return jnp.concatenate([view.qpos, view.qvel])

  def reward(self, view: View) -> jax.Array:
    near = rewards.tolerance(
      jnp.linalg.norm(view.qpos), (0.0, _TARGET_RADIUS), margin=_TARGET_RADIUS
    )
    effort = rewards.tolerance(
      view.ctrl, margin=1.0, sigmoid="quadratic", value_at_margin=0.0
    )
    return near * (4.0 + effort.mean()) / 5.0


TASKS = {"pointmass-easy": Easy}
