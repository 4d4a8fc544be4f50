"""Reacher: a planar arm of two to four links brings its finger to a target."""

import functools
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np

from envs_mjx import randomize, rewards
from envs_mjx.physics import Physics, View, load_model
from envs_mjx.task import Start, Task

# Length of each link, metres, by the number of links; two are dm_control's own.
_LINK_LENGTH = {2: 0.12, 3: 0.09, 4: 0.06}
_FINGER_RADIUS = 0.01
_TARGET_HEIGHT = 0.01
_TARGET_DISTANCE = (0.05, 0.2)  # metres from the shoulder


@functools.cache
def _physics(num_links: int) -> Physics:
  from dm_control.suite import reacher

  xml, assets = reacher.get_model_and_assets()
  if num_links > 2:
    xml = _with_links(xml, num_links)
  return Physics(load_model(xml, assets), n_substeps=1)


def _with_links(xml: bytes | str, num_links: int) -> str:
  """dm_control's model with its upper arm replaced by a chain of shorter links."""
  root = ElementTree.fromstring(xml)
  world, motors = root.find("worldbody"), root.find("actuator")
  arm = world.find("body[@name='arm']")
  hand = arm.find("body[@name='hand']")
  position = list(world).index(arm)
  world.remove(arm)

  length = str(_LINK_LENGTH[num_links])
  bent = {"limited": "true", "range": "-80 80"}
  innermost = None
  for i in range(num_links - 1):
    pos = arm.get("pos") if i == 0 else f"{length} 0 0"
    link = ElementTree.Element("body", name=f"arm{i}", pos=pos)
    capsule = arm.find("geom").attrib
    capsule |= {"name": f"arm{i}", "fromto": f"0 0 0 {length} 0 0"}
    ElementTree.SubElement(link, "geom", capsule)
    limits = {} if i == 0 else bent
    ElementTree.SubElement(link, "joint", name=f"shoulder{i}", **limits)
    if innermost is None:
      world.insert(position, link)
    else:
      innermost.append(link)
    innermost = link
  hand.set("pos", f"{length} 0 0")
  hand.find("joint").attrib.update(bent)
  hand.find("body[@name='finger']").set("pos", f"{length} 0 0")
  innermost.append(hand)

  motors.remove(motors.find("motor[@name='shoulder']"))
  for i in range(num_links - 1):
    motor = ElementTree.Element("motor", name=f"shoulder{i}", joint=f"shoulder{i}")
    motors.insert(i, motor)
  return ElementTree.tostring(root, encoding="unicode")


class Reach(Task):
  """Reward 1 while the finger touches the target.

  Args:
    target_radius: metres.
    num_links: links of the arm, each with a motor.
  """

  def __init__(self, target_radius: float, num_links: int = 2):
    self.physics = _physics(num_links)
    self.obs_size = 2 * num_links + 2
    self._length = np.float32(_LINK_LENGTH[num_links])
    self._reach = target_radius + _FINGER_RADIUS

  def initialize(self, key: jax.Array) -> Start:
    joints_key, angle_key, distance_key = jax.random.split(key, 3)
    qpos = randomize.limited_and_rotational_joints(joints_key, self.physics.model)
    angle = jax.random.uniform(angle_key, maxval=2.0 * jnp.pi)
    low, high = _TARGET_DISTANCE
    distance = jax.random.uniform(distance_key, minval=low, maxval=high)
    target = distance * jnp.stack([jnp.sin(angle), jnp.cos(angle)])
    position = jnp.concatenate([target, jnp.full(1, _TARGET_HEIGHT)])
    return Start(qpos=qpos, params={"geom_pos.target": position})

  def observation(self, view: View) -> jax.Array:
    return jnp.concatenate([view.qpos, self._to_target(view), view.qvel])

  def reward(self, view: View) -> jax.Array:
    distance = jnp.linalg.norm(self._to_target(view))
    return rewards.tolerance(distance, (0.0, self._reach))

  def _to_target(self, view: View) -> jax.Array:
    angles = jnp.cumsum(view.qpos)
    finger = self._length * jnp.stack([jnp.cos(angles).sum(), jnp.sin(angles).sum()])
    return view.params["geom_pos.target"][:2] - finger


_EASY, _HARD = 0.05, 0.015

TASKS = {
  "reacher-easy": functools.partial(Reach, _EASY),
  "reacher-hard": functools.partial(Reach, _HARD),
  "reacher-three-easy": functools.partial(Reach, _EASY, num_links=3),
  "reacher-three-hard": functools.partial(Reach, _HARD, num_links=3),
  "reacher-four-easy": functools.partial(Reach, _EASY, num_links=4),
  "reacher-four-hard": functools.partial(Reach, _HARD, num_links=4),
}
