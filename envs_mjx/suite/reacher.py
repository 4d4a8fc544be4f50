"""Reacher: a planar two-link arm brings its finger to a target."""

import functools

import jax
import jax.numpy as jnp

from envs_mjx import rewards
from envs_mjx.physics import Physics, View, load_model
from envs_mjx.task import Start, Task

_LINK_LENGTH = 0.12
_FINGER_RADIUS = 0.01
_TARGET_HEIGHT = 0.01


@functools.cache
def _physics() -> Physics:
  from dm_control.suite import reacher

  return Physics(load_model(*reacher.get_model_and_assets()), n_substeps=1)


class Reach(Task):
  """Reward 1 while the finger touches the target.

  Args:
    target_radius: metres.
  """

  obs_size = 6

  def __init__(self, target_radius: float):
    self.physics = _physics()
    self._reach = target_radius + _FINGER_RADIUS

  def initialize(self, key: jax.Array) -> Start:
    joints_key, angle_key, radius_key = jax.random.split(key, 3)
    _, wrist_limit = self.physics.model.joint("wrist").range
    limit = jnp.array([jnp.pi, wrist_limit], jnp.float32)
    qpos = limit * jax.random.uniform(joints_key, (2,), minval=-1.0, maxval=1.0)
    angle = jax.random.uniform(angle_key, maxval=2.0 * jnp.pi)
    radius = jax.random.uniform(radius_key, minval=0.05, maxval=0.2)
    target = jnp.stack([radius * jnp.sin(angle), radius * jnp.cos(angle)])
    position = jnp.concatenate([target, jnp.full(1, _TARGET_HEIGHT)])
    return Start(qpos=qpos, params={"geom_pos.target": position})

  def observation(self, view: View) -> jax.Array:
    return jnp.concatenate([view.qpos, self._to_target(view), view.qvel])

  def reward(self, view: View) -> jax.Array:
    distance = jnp.linalg.norm(self._to_target(view))
    return rewards.tolerance(distance, (0.0, self._reach))

  def _to_target(self, view: View) -> jax.Array:
    angles = jnp.cumsum(view.qpos)
    finger = _LINK_LENGTH * jnp.stack([jnp.cos(angles).sum(), jnp.sin(angles).sum()])
    return view.params["geom_pos.target"][:2] - finger


TASKS = {
  "reacher-easy": functools.partial(Reach, target_radius=0.05),
  "reacher-hard": functools.partial(Reach, target_radius=0.015),
}
