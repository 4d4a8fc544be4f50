"""Swimmer: a chain of bodies that swims in the plane."""

import functools

import jax
import jax.numpy as jnp

from envs_mjx import randomize, rewards
from envs_mjx.physics import Physics, Stage, View, load_model, only_colliding
from envs_mjx.task import Start, Task

_N_SUBSTEPS = 15
_ROOTS = 2  # slides, which stay at zero
_TARGET_HEIGHT = 0.05
# The target lies within a box of this half-width, metres; the near one is rarer.
_NEAR, _FAR, _NEAR_PROBABILITY = 0.3, 2.0, 0.2


@functools.cache
def _physics(num_links: int) -> Physics:
  from dm_control.suite import swimmer

  model = load_model(*swimmer.get_model_and_assets(num_links))
  # The model disables contacts.
  stepped = only_colliding(model, ())
  return Physics(model, _N_SUBSTEPS, stage=Stage.VELOCITY, stepped=stepped)


class Swim(Task):
  """Brings the nose to a target.

  Args:
    num_links: bodies in the chain.
  """

  def __init__(self, num_links: int):
    self.physics = _physics(num_links)
    self.obs_size = 4 * num_links + 1
    model = self.physics.model
    self._head, self._nose = model.body("head").id, model.geom("nose").id
    self._target_size = float(model.geom("target").size[0])
    # Velocimeter and gyro of each body, the head first.
    first = self.physics.sensor("head_vel").start
    self._velocities = slice(first, first + 6 * num_links)

  def initialize(self, key: jax.Array) -> Start:
    joints_key, near_key, target_key = jax.random.split(key, 3)
    near = jax.random.uniform(near_key) < _NEAR_PROBABILITY
    reach = jnp.where(near, _NEAR, _FAR)
    target = reach * jax.random.uniform(target_key, (2,), minval=-1.0, maxval=1.0)
    position = jnp.concatenate([target, jnp.full(1, _TARGET_HEIGHT)])
    qpos = randomize.limited_and_rotational_joints(joints_key, self.physics.model)
    return Start(qpos=qpos, params={"geom_pos.target": position})

  def observation(self, view: View) -> jax.Array:
    velocities = view.sensordata[self._velocities].reshape(-1, 6)
    planar = velocities[:, jnp.array([0, 1, 5])]
    joints = view.qpos[_ROOTS + 1 :]
    return jnp.concatenate([joints, self._to_target(view), planar.ravel()])

  def reward(self, view: View) -> jax.Array:
    size = self._target_size
    return rewards.tolerance(
      jnp.linalg.norm(self._to_target(view)),
      (0.0, size),
      margin=5.0 * size,
      sigmoid="long_tail",
    )

  def _to_target(self, view: View) -> jax.Array:
    """From the nose to the target in the frame of the head, f32[2], metres."""
    offset = view.params["geom_pos.target"] - view.data.geom_xpos[self._nose]
    return (offset @ view.data.xmat[self._head])[:2]


TASKS = {"swimmer-swimmer6": functools.partial(Swim, num_links=6)}
