"""Distances to ellipsoids, and their contacts, against independent answers."""

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from envs_mjx import collision, ellipsoid

# Semi-axes: a torso, a skull, a flat one.
_SIZES = [(0.05, 0.08, 0.12), (0.035, 0.03, 0.025), (0.2, 0.15, 0.02)]

_TWO_BODIES = """
<mujoco>
  <option><flag nativeccd="enable"/></option>
  <worldbody>
    <body name="a"><freejoint/><geom type="{kind}" size="0.02 0.06"/></body>
    <body name="b"><freejoint/><geom type="ellipsoid" size="{size}"/></body>
  </worldbody>
</mujoco>"""


def _surface(rng, size, n):
  """Points on the surface and their unit normals."""
  point = rng.normal(size=(n, 3))
  point = point / np.linalg.norm(point, axis=1, keepdims=True) * size
  normal = point / np.square(size)
  return point, normal / np.linalg.norm(normal, axis=1, keepdims=True)


@pytest.mark.parametrize("size", _SIZES)
def test_distance_outside_and_inside(size):
  """A point moved from the surface along its normal has just that distance."""
  rng = np.random.default_rng(0)
  point, normal = _surface(rng, np.array(size), 2000)
  # Inwards only as far as the surface's smallest radius of curvature allows.
  smallest = min(size) ** 2 / max(size)
  moved = rng.uniform(-0.8 * smallest, 0.1, 2000)
  run = jax.jit(jax.vmap(lambda p: ellipsoid.distance(p, jnp.float32(size))))
  dist, got = run(jnp.float32(point + moved[:, None] * normal))
  np.testing.assert_allclose(dist, moved, atol=5e-7)
  assert np.min(np.sum(got * normal, axis=1)) > 1 - 1e-3


def test_points_on_the_axes_and_in_the_centre_are_finite():
  size = jnp.float32(_SIZES[0])
  points = jnp.float32([[0, 0, 0], [0, 0, 0.12], [0.2, 0, 0], [0, -0.01, 0]])
  dist, normal = jax.vmap(lambda p: ellipsoid.distance(p, size))(points)
  np.testing.assert_allclose(dist, [-0.05, 0.0, 0.15, -0.05], atol=2e-3)
  np.testing.assert_allclose(np.linalg.norm(normal, axis=1), 1.0, atol=1e-5)


def _poses(rng, n, spread):
  quat = rng.normal(size=(n, 2, 4))
  quat /= np.linalg.norm(quat, axis=2, keepdims=True)
  qpos = np.zeros((n, 14))
  qpos[:, 0:3] = rng.uniform(-spread, spread, (n, 3))
  qpos[:, 3:7], qpos[:, 10:14] = quat[:, 0], quat[:, 1]
  return qpos


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("kind", ["sphere", "capsule"])
def test_contacts_equal_cs_distances(kind, size):
  xml = _TWO_BODIES.format(kind=kind, size=" ".join(map(str, size)))
  model = mujoco.MjModel.from_xml_string(xml)
  data = mujoco.MjData(model)
  expected, places = [], []
  for qpos in _poses(np.random.default_rng(1), 400, max(size) + 0.02):
    data.qpos = qpos
    mujoco.mj_kinematics(model, data)
    expected.append(mujoco.mj_geomDistance(model, data, 0, 1, 1.0, np.zeros(6)))
    places.append((data.geom_xpos.copy(), data.geom_xmat.reshape(-1, 3, 3).copy()))
  position, rotation = (jnp.float32(np.array(x)) for x in zip(*places, strict=True))
  sizes = jnp.float32(model.geom_size)
  contact = getattr(collision, f"{kind}_ellipsoid")

  @jax.jit
  @jax.vmap
  def run(pos, mat):
    return contact(pos[0], mat[0], sizes[0], pos[1], mat[1], sizes[1])

  dist, pos, frame = map(np.asarray, run(position, rotation))
  expected = np.array(expected)
  # The surfaces' separation is unique; how deep they overlap need not be: an axis may
  # leave by another side. Deep overlaps may not be said to be shallower than C's.
  apart = expected > -0.3 * min(size)
  assert apart.sum() > 100 and (expected[apart] < 0).sum() > 5
  np.testing.assert_allclose(dist[apart], expected[apart], atol=2e-5)
  np.testing.assert_allclose(np.linalg.det(frame), 1.0, atol=1e-4)
  # The contact lies halfway between the surfaces, along the normal.
  normal, local = frame[:, 0], lambda x: np.einsum("ij,ijk->ik", x, rotation[:, 1])
  on_ellipsoid = local(pos + 0.5 * dist[:, None] * normal - position[:, 1])
  level = np.sum(np.square(on_ellipsoid / size), axis=1)
  np.testing.assert_allclose(level[apart], 1.0, atol=2e-3)
