"""Finger: two links spin a freely hinged body, or turn it to a target angle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from envs_mjx import randomize
from envs_mjx.physics import Physics, View, load_model, only_colliding
from envs_mjx.task import Start, Task

# At most 2 contacts were seen, one with each capsule of the spinner.
_MAX_CONTACTS = 4
_N_SUBSTEPS = 2
# Nothing else can reach each other, whatever the joints.
_COLLIDING = ("fingertip", "cap1", "cap2")

_SPIN_SPEED = 15.0  # rad/s
_SPIN_DAMPING = 0.03  # of the hinge, N·m·s/rad
# A start in contact is drawn with probability 0.094, all of these with 6e-10.
_MAX_DRAWS = 9

# Geometry in the plane (x, z), metres: see the model's XML.
_BASE = (-0.2, 0.4)
_KNEE = 0.18  # from the base
_FINGERTIP = (0.13, 0.161)  # ends of the fingertip's axis, from the knee
_HINGE = (0.2, 0.4)
_CAPS = (-0.02, 0.02)  # x of the spinner's capsules, in its frame
_CAP_REACH = 0.09  # half their length
_TIP = 0.13  # from the hinge to the spinner's tip
_TOUCH_DISTANCE = 0.07  # between the axes of fingertip and capsule


@functools.cache
def _physics(spin: bool) -> Physics:
  from dm_control.suite import finger

  model = load_model(*finger.get_model_and_assets(), max_contacts=_MAX_CONTACTS)
  if spin:
    model.dof_damping[model.joint("hinge").dofadr[0]] = _SPIN_DAMPING
  stepped = only_colliding(model, _COLLIDING)
  return Physics(model, _N_SUBSTEPS, acceleration_sensors=True, stepped=stepped)


class Finger(Task):
  """Reset and observation of every finger task."""

  obs_size = 9

  def __init__(self, spin: bool = False):
    self.physics = _physics(spin)
    top, bottom = self.physics.sensor("touchtop"), self.physics.sensor("touchbottom")
    self._touch_indices = jnp.array([top.start, bottom.start])

  def initialize(self, key: jax.Array) -> Start:
    """Draws all joints, such that the finger does not touch the spinner."""
    draw = functools.partial(
      randomize.limited_and_rotational_joints, model=self.physics.model
    )
    qpos = jax.vmap(draw)(jax.random.split(key, _MAX_DRAWS))
    return Start(randomize.first_accepted(qpos, ~jax.vmap(_touches)(qpos)))

  def observation(self, view: View) -> jax.Array:
    touch = jnp.log1p(view.sensordata[self._touch_indices])
    return jnp.concatenate([view.qpos[:2], _tip(view), view.qvel, touch])


class Spin(Finger):
  """Reward 1 while the body spins fast enough, in one direction."""

  def __init__(self):
    super().__init__(spin=True)

  def reward(self, view: View) -> jax.Array:
    return (view.qvel[2] <= -_SPIN_SPEED).astype(jnp.float32)


class Turn(Finger):
  """Reward 1 while the body's tip is within a target on its circle.

  Args:
    target_radius: metres.
  """

  obs_size = 12

  def __init__(self, target_radius: float):
    super().__init__()
    self._target_radius = target_radius

  def initialize(self, key: jax.Array) -> Start:
    key, angle_key = jax.random.split(key)
    angle = jax.random.uniform(angle_key, minval=-jnp.pi, maxval=jnp.pi)
    x, z = _HINGE[0] + _TIP * jnp.sin(angle), _HINGE[1] + _TIP * jnp.cos(angle)
    target = jnp.stack([x, jnp.zeros_like(x), z])
    return super().initialize(key)._replace(params={"site_pos.target": target})

  def observation(self, view: View) -> jax.Array:
    distance = self._distance(view)[None]
    return jnp.concatenate([super().observation(view), _target(view), distance])

  def reward(self, view: View) -> jax.Array:
    return (self._distance(view) <= 0.0).astype(jnp.float32)

  def _distance(self, view: View) -> jax.Array:
    """From the tip to the edge of the target, negative within; metres."""
    return jnp.linalg.norm(_target(view) - _tip(view)) - self._target_radius


def _tip(view: View) -> jax.Array:
  """The spinner's tip f32[2] in (x, z) from its hinge, metres."""
  angle = view.qpos[2]
  return _TIP * jnp.stack([-jnp.sin(angle), jnp.cos(angle)])


def _target(view: View) -> jax.Array:
  """The target f32[2] in (x, z) from the spinner's hinge, metres."""
  position = view.params["site_pos.target"]
  return jnp.stack([position[0], position[2]]) - jnp.array(_HINGE)


def _touches(qpos: jax.Array) -> jax.Array:
  """Whether the fingertip touches the spinner, bool[]."""
  upper, lower = qpos[0], qpos[0] + qpos[1]
  knee = jnp.array(_BASE) + _KNEE * _direction(upper)
  tip = [knee + reach * _direction(lower) for reach in _FINGERTIP]
  along = _direction(qpos[2] + np.pi / 2)
  across = _direction(qpos[2])
  distances = []
  for x in _CAPS:
    middle = jnp.array(_HINGE) + x * across
    cap = [middle - _CAP_REACH * along, middle + _CAP_REACH * along]
    distances.append(_segment_distance(*tip, *cap))
  return jnp.min(jnp.stack(distances)) < _TOUCH_DISTANCE


def _direction(angle: jax.Array) -> jax.Array:
  return jnp.stack([jnp.cos(angle), jnp.sin(angle)])


def _segment_distance(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array):
  """Distance f32[] between the segments a-b and c-d, f32[2] each; 0 if they cross."""

  def to_segment(point, start, end):
    part = end - start
    along = jnp.clip(jnp.dot(point - start, part) / jnp.dot(part, part), 0.0, 1.0)
    return jnp.linalg.norm(point - start - along * part)

  def side(point, start, end):
    u, v = end - start, point - start
    return u[0] * v[1] - u[1] * v[0]

  cross = (side(a, c, d) * side(b, c, d) < 0) & (side(c, a, b) * side(d, a, b) < 0)
  ends = (to_segment(a, c, d), to_segment(b, c, d), to_segment(c, a, b))
  nearest = jnp.min(jnp.stack([*ends, to_segment(d, a, b)]))
  return jnp.where(cross, 0.0, nearest)


TASKS = {
  "finger-spin": Spin,
  "finger-turn-easy": functools.partial(Turn, target_radius=0.07),
  "finger-turn-hard": functools.partial(Turn, target_radius=0.03),
}
