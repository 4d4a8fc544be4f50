"""Fish: swims in a fluid without gravity."""

import functools
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np

from envs_mjx import rewards, rotations
from envs_mjx.physics import Physics, View, load_model, only_colliding
from envs_mjx.task import Start, Task

_N_SUBSTEPS = 10
_HEIGHT = 0.1  # of the start, metres
_NUM_JOINTS = 7
_JOINT_RANGE = 0.2  # rad, of the start
_TARGET_LOW, _TARGET_HIGH = (-0.4, -0.4, 0.1), (0.4, 0.4, 0.3)  # metres


# Walls around x, y = ±0.15; near one is nearer than this in x or in y.
_WALL = 0.15
_WALL_SIZE, _WALL_HEIGHT = "0.05 0.05 0.1", 0.1
_TARGET_CLEARANCE, _TORSO_CLEARANCE = 0.08, 0.06


@functools.cache
def _physics(walls: bool = False) -> Physics:
  from dm_control.suite import fish

  xml, assets = fish.get_model_and_assets()
  model = load_model(_with_walls(xml) if walls else xml, assets)
  # The model disables constraints, so that contacts could not act.
  return Physics(model, _N_SUBSTEPS, stepped=only_colliding(model, ()))


def _with_walls(xml: bytes | str) -> str:
  root = ElementTree.fromstring(xml)
  world = root.find("worldbody")
  place = list(world).index(world.find("geom[@name='ground']")) + 1
  for i, (x, y) in enumerate([(-1, -1), (1, -1), (1, 1), (-1, 1)]):
    pos = f"{x * _WALL} {y * _WALL} {_WALL_HEIGHT}"
    wall = {"name": f"wall{i}", "type": "box", "material": "self", "pos": pos}
    world.insert(place + i, ElementTree.Element("geom", wall, size=_WALL_SIZE))
  return ElementTree.tostring(root, encoding="unicode")


class Fish(Task):
  """Model and reset of every fish task."""

  obs_size = 21
  walls = False

  def __init__(self):
    self.physics = _physics(self.walls)
    model = self.physics.model
    self._mouth = np.float32(model.geom("mouth").pos)
    self._reach = float(model.geom("mouth").size[0] + model.geom("target").size[0])

  def initialize(self, key: jax.Array) -> Start:
    rotation_key, joints_key = jax.random.split(key)
    joints = jax.random.uniform(
      joints_key, (_NUM_JOINTS,), minval=-_JOINT_RANGE, maxval=_JOINT_RANGE
    )
    position = jnp.array([0.0, 0.0, _HEIGHT])
    return Start(jnp.concatenate([position, rotations.uniform(rotation_key), joints]))

  def observation(self, view: View) -> jax.Array:
    upright = self.rotation(view)[2, 2]
    return jnp.concatenate([view.qpos[7:], upright[None], view.qvel])

  def rotation(self, view: View) -> jax.Array:
    """Orientation of the torso f32[3, 3]."""
    return rotations.matrix(rotations.normalize(view.qpos[3:7]))


class Upright(Fish):
  """Holds the torso upright."""

  def reward(self, view: View) -> jax.Array:
    upright = jnp.minimum(self.rotation(view)[2, 2], 1.0)  # Rounding may exceed 1.
    return rewards.tolerance(upright, (1.0, 1.0), margin=1.0)


class Swim(Fish):
  """Brings the mouth to a target, and is upright."""

  obs_size = 24

  def initialize(self, key: jax.Array) -> Start:
    key, target_key = jax.random.split(key)
    target = self.draw_target(target_key)
    return super().initialize(key)._replace(params={"geom_pos.target": target})

  def draw_target(self, key: jax.Array) -> jax.Array:
    """Position f32[3] of the target, metres."""
    low, high = jnp.array(_TARGET_LOW), jnp.array(_TARGET_HIGH)
    return low + (high - low) * jax.random.uniform(key, (3,))

  def observation(self, view: View) -> jax.Array:
    x, y, z = self._mouth_to_target(view) @ self.rotation(view)
    # In the frame of the mouth, which is turned about the torso's x axis.
    to_target = jnp.stack([x, -z, y])
    joints, upright, velocity = jnp.split(super().observation(view), [7, 8])
    return jnp.concatenate([joints, upright, to_target, velocity])

  def reward(self, view: View) -> jax.Array:
    distance = jnp.linalg.norm(self._mouth_to_target(view))
    near = rewards.tolerance(distance, (0.0, self._reach), margin=2 * self._reach)
    upright = (self.rotation(view)[2, 2] + 1.0) / 2.0
    return (7.0 * near + upright) / 8.0

  def _mouth_to_target(self, view: View) -> jax.Array:
    """World-frame vector f32[3], metres."""
    mouth = view.qpos[:3] + self.rotation(view) @ self._mouth
    return view.params["geom_pos.target"] - mouth


class SwimBetweenObstacles(Swim):
  """Swims to a target, and earns nothing near a wall, which would not stop it."""

  walls = True

  def draw_target(self, key: jax.Array) -> jax.Array:
    # Where a uniform draw of x or y would be too near to a wall, dm_control draws
    # again; here the free intervals are drawn from at once.
    low, high = _TARGET_LOW[0], _TARGET_HIGH[0]
    near, far = _WALL - _TARGET_CLEARANCE, _WALL + _TARGET_CLEARANCE
    starts, ends = np.array([low, -near, far]), np.array([-far, near, high])
    passed = np.concatenate([[0.0], np.cumsum(ends - starts)])
    draw = passed[-1] * jax.random.uniform(key, (3,))
    interval = jnp.sum(draw[:2, None] >= passed[1:-1], axis=1)
    plane = jnp.float32(starts - passed[:-1])[interval] + draw[:2]
    height = _TARGET_LOW[2] + (_TARGET_HIGH[2] - _TARGET_LOW[2]) * draw[2] / passed[-1]
    return jnp.concatenate([plane, height[None]])

  def reward(self, view: View) -> jax.Array:
    distance = jnp.abs(jnp.abs(view.qpos[:2]) - _WALL)
    clear = jnp.all(distance >= _TORSO_CLEARANCE)
    return jnp.where(clear, super().reward(view), 0.0)


TASKS = {
  "fish-obstacles": SwimBetweenObstacles,
  "fish-swim": Swim,
  "fish-upright": Upright,
}
