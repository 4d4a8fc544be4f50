"""Corrections to MJX's capsule contacts, so that they equal C MuJoCo's.

MJX (up to the versions in `CHECKED_VERSIONS`) computes three things otherwise than
C MuJoCo does, in float64 as well as in float32:

1. Plane-capsule: C aligns the first friction direction with the capsule's axis
   always; MJX takes a fixed axis when the capsule is within 30 degrees of the
   plane's normal. With a pyramidal cone this turns the friction pyramid.
2. Sphere-capsule and capsule-capsule: MJX adds 1e-6 to the denominators of its
   closest-point formulas, which displaces the contact (by 1e-3 of the length for
   the short segments of some models).
3. Capsule-capsule with crossing axes: C takes the cross product of the axes as the
   normal, which in a planar model cannot push within the plane; MJX takes the
   normalised rounding error of the separation, an arbitrary direction in it.

Each makes a one-step error of up to several rad/s where it applies. This module
holds contact functions of our own for the three pairs and `corrections()`, a
context in which MJX's dispatch table uses them:

    with collision.corrections():
      data = mjx.step(model, data)   # while this is traced

Outside the context, and in other threads, MJX is what it was.
"""

import contextlib
import importlib.metadata
import threading
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from mujoco import mjx
from mujoco.mjx._src import collision_driver

CHECKED_VERSIONS = ("3.17.0",)
MJX_VERSION = importlib.metadata.version("mujoco-mjx")

# Axes nearer than this (metres) at interior points of both segments count as
# crossing. Float32 positions 100 m from the origin have a spacing of 8e-6 m.
_CROSSING_DISTANCE = 1e-4
# Below this squared sine of the angle between the axes, the capsules are parallel.
_PARALLEL_SIN2 = 1e-6
_TINY = 1e-12

_PLANE = mjx.GeomType.PLANE
_SPHERE = mjx.GeomType.SPHERE
_CAPSULE = mjx.GeomType.CAPSULE


# ----------------------------------------------------------------- geometry


def _normalize_or(vec: jax.Array, fallback: jax.Array) -> jax.Array:
  """Returns vec f[3] at unit length, or `fallback` where vec is (nearly) zero."""
  length = jnp.sqrt(vec @ vec)
  return jnp.where(length > _TINY, vec / jnp.maximum(length, _TINY), fallback)


def contact_frame(normal: jax.Array) -> jax.Array:
  """Completes a unit normal f[3] to the right-handed frame f[3, 3] that C makes.

  Rows: normal, first and second tangent. The first tangent is the y axis made
  orthogonal to the normal, or the z axis where the normal is within 60 degrees of y.
  """
  y, z = jnp.eye(3)[1], jnp.eye(3)[2]
  reference = jnp.where(jnp.abs(normal[1]) < 0.5, y, z)
  tangent = _normalize_or(reference - normal * (normal @ reference), z)
  return jnp.stack([normal, tangent, jnp.cross(normal, tangent)])


def plane_capsule(plane_pos, plane_mat, cap_pos, cap_mat, cap_size):
  """Contacts of both ends of one capsule with a plane.

  Args:
    plane_pos: f[3] a point of the plane.
    plane_mat: f[3, 3] orientation; the last column is the plane's normal.
    cap_pos: f[3] centre of the capsule.
    cap_mat: f[3, 3] orientation; the last column is the capsule's axis.
    cap_size: f[3] radius, half length, unused.

  Returns:
    dist f[2], pos f[2, 3], frame f[2, 3, 3], as C orders and directs them.
  """
  normal, axis = plane_mat[:, 2], cap_mat[:, 2]
  radius, half_length = cap_size[0], cap_size[1]
  # A capsule exactly along the normal has no direction in the plane: C takes x.
  x, y = jnp.eye(3)[0], jnp.eye(3)[1]
  spare = jnp.where(jnp.abs(normal[0]) < 0.9, x, y)
  spare = _normalize_or(spare - normal * (normal @ spare), y)
  tangent = _normalize_or(axis - normal * (normal @ axis), spare)
  frame = jnp.stack([normal, tangent, jnp.cross(normal, tangent)])
  ends = cap_pos + half_length * jnp.stack([axis, -axis])
  dist = (ends - plane_pos) @ normal - radius
  pos = ends - normal * (radius + 0.5 * dist)[:, None]
  return dist, pos, jnp.stack([frame, frame])


def sphere_capsule(sphere_pos, sphere_mat, sphere_size, cap_pos, cap_mat, cap_size):
  """Contact of one sphere with one capsule; arguments as `capsule_capsule`'s.

  Returns:
    dist f[], pos f[3], frame f[3, 3].
  """
  axis = cap_mat[:, 2]
  along = jnp.clip((sphere_pos - cap_pos) @ axis, -cap_size[1], cap_size[1])
  offset = cap_pos + along * axis - sphere_pos
  separation = jnp.sqrt(offset @ offset)
  across = jnp.cross(sphere_mat[:, 2], axis)
  normal = _normalize_or(offset, _normalize_or(across, jnp.eye(3)[0]))
  dist = separation - sphere_size[0] - cap_size[0]
  pos = sphere_pos + normal * (sphere_size[0] + 0.5 * dist)
  return dist, pos, contact_frame(normal)


def _closest_on_axes(offset, axis1, axis2, half1, half2):
  """Closest points of two segments, as distances along their axes.

  Args:
    offset: f[3] centre of the second segment minus that of the first.
    axis1: f[3] unit direction of the first segment; axis2 likewise.
    half1: f[] half length of the first segment; half2 likewise.

  Returns:
    (t1, t2, interior): the points lie at centre + t * axis; `interior` says whether
    the closest points of the infinite lines lie within both segments.
  """
  across = jnp.cross(axis1, axis2)
  sin2 = across @ across
  # Triple products lose less in float32 than 1 - cos^2 and its companions do.
  line1 = jnp.cross(offset, axis2) @ across / jnp.maximum(sin2, _TINY)
  line2 = jnp.cross(offset, axis1) @ across / jnp.maximum(sin2, _TINY)
  interior = (jnp.abs(line1) <= half1) & (jnp.abs(line2) <= half2)
  cosine = axis1 @ axis2
  t1 = jnp.clip(line1, -half1, half1)
  t2 = jnp.clip(t1 * cosine - offset @ axis2, -half2, half2)
  t1 = jnp.clip(t2 * cosine + offset @ axis1, -half1, half1)
  return t1, t2, interior & (sin2 > _PARALLEL_SIN2)


def capsule_capsule(pos1, mat1, size1, pos2, mat2, size2):
  """Contact of two capsules.

  C emits a second contact where the axes are exactly parallel; this does not, for
  MJX has one slot for a pair of capsules.

  Args:
    pos1: f[3] centre of the first capsule; pos2 likewise.
    mat1: f[3, 3] orientation, the last column is the axis; mat2 likewise.
    size1: f[3] radius, half length, unused; size2 likewise.

  Returns:
    dist f[] (negative in penetration), pos f[3], frame f[3, 3] whose first row
    points from the first capsule to the second.
  """
  axis1, axis2 = mat1[:, 2], mat2[:, 2]
  t1, t2, interior = _closest_on_axes(pos2 - pos1, axis1, axis2, size1[1], size2[1])
  point1 = pos1 + t1 * axis1
  # The difference of the centres first: far from the origin it keeps more digits.
  offset = (pos2 - pos1) + t2 * axis2 - t1 * axis1
  separation = jnp.sqrt(offset @ offset)

  across = _normalize_or(jnp.cross(axis1, axis2), jnp.eye(3)[0])
  # Between interior points the offset is parallel to `across`; where it is too small
  # to have a direction of its own, `across` gives it.
  height = offset @ across
  crossing = interior & (separation < _CROSSING_DISTANCE)
  separation = jnp.where(crossing, jnp.abs(height), separation)
  sign = jnp.where(height < -1e-2 * _CROSSING_DISTANCE, -1.0, 1.0)
  normal = jnp.where(crossing, sign * across, _normalize_or(offset, across))

  dist = separation - size1[0] - size2[0]
  pos = point1 + normal * (size1[0] + 0.5 * dist)
  return dist, pos, contact_frame(normal)


# ------------------------------------------------- entry into MJX's dispatch


def _collider(contact_fn: Callable, ncon: int, pass_plane_size: bool) -> Callable:
  """Wraps a function of two geoms as MJX's driver calls it, over pairs of a kind."""

  def collide(m, d, key, geom):
    del key
    first, second = geom.T
    args = [d.geom_xpos[first], d.geom_xmat[first], m.geom_size[first]]
    if not pass_plane_size:
      args.pop()
    args += [d.geom_xpos[second], d.geom_xmat[second], m.geom_size[second]]
    contacts = jax.vmap(contact_fn)(*args)
    if ncon == 1:
      return contacts
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), contacts)

  collide.ncon = ncon
  return collide


_CORRECTED = {
  (_PLANE, _CAPSULE): _collider(plane_capsule, 2, pass_plane_size=False),
  (_SPHERE, _CAPSULE): _collider(sphere_capsule, 1, pass_plane_size=True),
  (_CAPSULE, _CAPSULE): _collider(capsule_capsule, 1, pass_plane_size=True),
}

_lock = threading.Lock()
_users = 0  # contexts open in all threads; the table is patched while there are any
_stock: dict = {}
_this_thread = threading.local()


def _for_this_thread(corrected: Callable, stock: Callable) -> Callable:
  """Uses the correction where the calling thread has an open context."""

  def collide(m, d, key, geom):
    active = getattr(_this_thread, "depth", 0) > 0
    return (corrected if active else stock)(m, d, key, geom)

  collide.ncon = stock.ncon
  return collide


def check_version(version: str = MJX_VERSION) -> None:
  """Warns where the corrections have not been compared with C MuJoCo.

  Args:
    version: version of the package mujoco-mjx, e.g. "3.17.0".
  """
  if version not in CHECKED_VERSIONS:
    warnings.warn(
      f"MJX {version} is installed; envs_mjx corrects its capsule contacts as checked "
      f"with {', '.join(CHECKED_VERSIONS)}. Run tests/envs/test_collision.py to see "
      "whether they still apply, or install a version on that list.",
      RuntimeWarning,
      stacklevel=3,
    )


def _install() -> None:
  table = collision_driver._COLLISION_FUNC
  for pair, corrected in _CORRECTED.items():
    stock = table.get(pair)
    if getattr(stock, "ncon", None) != corrected.ncon:
      raise RuntimeError(
        f"MJX {MJX_VERSION} has another contact function for {pair} than the "
        f"one envs_mjx corrects; install one of {', '.join(CHECKED_VERSIONS)}."
      )
  for pair, corrected in _CORRECTED.items():
    _stock[pair] = table[pair]
    table[pair] = _for_this_thread(corrected, table[pair])


def _restore() -> None:
  collision_driver._COLLISION_FUNC.update(_stock)
  _stock.clear()


@contextlib.contextmanager
def corrections() -> Iterator[None]:
  """Lets MJX use the corrected contact functions in this thread.

  Open it around the calls that trace MJX's collision (`mjx.step`, `mjx.forward`); a
  function traced inside keeps the corrections for good. Contexts nest.

  Raises:
    RuntimeError: MJX's dispatch table is not the one that the corrections are for.
  """
  global _users
  check_version()
  with _lock:
    if _users == 0:
      _install()
    _users += 1
  _this_thread.depth = getattr(_this_thread, "depth", 0) + 1
  try:
    yield
  finally:
    _this_thread.depth -= 1
    with _lock:
      _users -= 1
      if _users == 0:
        _restore()
