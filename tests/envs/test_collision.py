"""Corrected capsule contacts against C MuJoCo's, and the life of the correction."""

import threading
import warnings

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from mujoco import mjx
from mujoco.mjx._src import collision_driver

from envs_mjx import collision

_POSES = 400
# Float32 of positions below 2 m, twice over.
_TOLERANCE = 2e-6

_TWO_BODIES = """
<mujoco>
  <worldbody>
    <body name="a"><freejoint/><geom type="{kind}" size="{size}"/></body>
    <body name="b"><freejoint/><geom type="capsule" size="0.1 0.3"/></body>
  </worldbody>
</mujoco>"""
_PLANE_AND_BODY = """
<mujoco>
  <worldbody>
    <geom type="plane" size="1 1 1" euler="{tilt} 0 0"/>
    <body><freejoint/><geom type="capsule" size="0.1 0.3"/></body>
  </worldbody>
</mujoco>"""


def _c_contacts(xml, qpos):
  """C MuJoCo's contacts in float64: lists of dist, pos, frame and geom poses."""
  model = mujoco.MjModel.from_xml_string(xml)
  data = mujoco.MjData(model)
  results = []
  for q in qpos:
    data.qpos = q
    mujoco.mj_forward(model, data)
    contacts = [
      (c.dist, c.pos.copy(), c.frame.reshape(3, 3).copy())
      for c in data.contact[: data.ncon]
    ]
    poses = data.geom_xpos.copy(), data.geom_xmat.reshape(-1, 3, 3).copy()
    results.append((contacts, *poses))
  return model, results


def _ours(contact_fn, model, results, with_plane=False):
  """The corrected function on the same poses in float32, vmapped and jitted."""
  pos = jnp.array([r[1] for r in results], jnp.float32)
  mat = jnp.array([r[2] for r in results], jnp.float32)
  size = jnp.array(model.geom_size, jnp.float32)
  first = () if with_plane else (size[0],)

  @jax.jit
  @jax.vmap
  def run(pos, mat):
    return contact_fn(pos[0], mat[0], *first, pos[1], mat[1], size[1])

  out = jax.tree.map(np.asarray, run(pos, mat))
  assert all(np.isfinite(x).all() for x in out)
  assert all(x.dtype == np.float32 for x in out)
  return out


def _random_quat(rng, n):
  quat = rng.normal(size=(n, 4))
  return quat / np.linalg.norm(quat, axis=1, keepdims=True)


def _pair_poses(rng, n=_POSES, spread=0.35):
  """Free poses of two bodies near each other, most of them touching."""
  qpos = np.zeros((n, 14))
  qpos[:, 0:3] = rng.uniform(-1, 1, (n, 3))
  qpos[:, 7:10] = qpos[:, 0:3] + rng.uniform(-spread, spread, (n, 3))
  qpos[:, 3:7] = _random_quat(rng, n)
  qpos[:, 10:14] = _random_quat(rng, n)
  return qpos


def _check_pairs(out, results, min_contacts, loose=1.0):
  """Compares the single contact of each pose with C's; misses must be real misses."""
  dist, pos, frame = out
  seen = 0
  for i, (contacts, _, _) in enumerate(results):
    if not contacts:
      assert dist[i] > -_TOLERANCE * loose
      continue
    assert len(contacts) == 1
    seen += 1
    c_dist, c_pos, c_frame = contacts[0]
    np.testing.assert_allclose(dist[i], c_dist, atol=_TOLERANCE * loose)
    separation = max(dist[i] + 0.2, 1e-3)
    np.testing.assert_allclose(pos[i], c_pos, atol=1e-6 * loose / separation)
    np.testing.assert_allclose(frame[i], c_frame, atol=1e-6 * loose / separation)
  assert seen >= min_contacts


@pytest.mark.parametrize("half_length", [0.3, 0.0155])
def test_sphere_capsule_equals_c_for_long_and_short_segments(half_length):
  rng = np.random.default_rng(0)
  xml = _TWO_BODIES.format(kind="sphere", size="0.1").replace(
    "0.1 0.3", f"0.1 {half_length}"
  )
  model, results = _c_contacts(xml, _pair_poses(rng, spread=0.15))
  out = _ours(collision.sphere_capsule, model, results)
  _check_pairs(out, results, min_contacts=100)


@pytest.mark.parametrize("half_length", [0.3, 0.02])
def test_capsule_capsule_equals_c_for_long_and_short_segments(half_length):
  rng = np.random.default_rng(1)
  xml = _TWO_BODIES.format(kind="capsule", size=f"0.1 {half_length}")
  model, results = _c_contacts(xml, _pair_poses(rng, spread=0.25))
  out = _ours(collision.capsule_capsule, model, results)
  _check_pairs(out, results, min_contacts=100)


def _planar_quat(angle):
  """Rotation about y, as the joints of planar models make it."""
  zero = np.zeros_like(angle)
  return np.stack([np.cos(angle / 2), zero, np.sin(angle / 2), zero], axis=1)


def _crossing_poses(rng, n, x0=0.0):
  """Capsules in the plane y = 0 whose axes cross well inside both segments."""
  qpos = np.zeros((n, 14))
  angle = rng.uniform(-np.pi, np.pi, n)
  other = angle + rng.uniform(0.3, np.pi - 0.3, n) * rng.choice([-1, 1], n)
  point = np.stack([x0 + rng.uniform(-1, 1, n), rng.uniform(-1, 1, n)], axis=1)
  for start, theta in ((0, angle), (7, other)):
    direction = np.stack([np.sin(theta), np.cos(theta)], axis=1)
    centre = point + rng.uniform(-0.2, 0.2, (n, 1)) * direction
    qpos[:, [start, start + 2]] = centre
    qpos[:, start + 3 : start + 7] = _planar_quat(theta)
  return qpos


@pytest.mark.parametrize("x0", [0.0, 100.0])
def test_crossing_axes_in_a_plane_give_cs_normal_across_it(x0):
  rng = np.random.default_rng(2)
  xml = _TWO_BODIES.format(kind="capsule", size="0.1 0.3")
  model, results = _c_contacts(xml, _crossing_poses(rng, 200, x0))
  dist, _, frame = _ours(collision.capsule_capsule, model, results)
  across = [i for i, r in enumerate(results) if abs(r[0][0][2][0, 1]) > 0.99]
  # In C the separation is at times not exactly 0 in float64; it then has no meaning.
  assert len(across) > 50
  np.testing.assert_allclose(dist, -0.2, atol=1e-6)
  np.testing.assert_allclose(np.abs(frame[:, 0, 1]), 1.0, atol=1e-6)
  for i in across:
    np.testing.assert_allclose(frame[i], results[i][0][0][2], atol=1e-5)


def test_nearly_crossing_axes_in_space_keep_their_side():
  rng = np.random.default_rng(3)
  qpos = _crossing_poses(rng, 100)
  gap = rng.choice([-1, 1], 100) * 10.0 ** rng.uniform(-5.5, -2, 100)
  qpos[:, 8] = gap
  xml = _TWO_BODIES.format(kind="capsule", size="0.1 0.3")
  model, results = _c_contacts(xml, qpos)
  dist, _, frame = _ours(collision.capsule_capsule, model, results)
  np.testing.assert_allclose(dist, np.abs(gap) - 0.2, atol=_TOLERANCE)
  expected = np.array([r[0][0][2][0] for r in results])
  steep = np.abs(gap) > 1e-4
  np.testing.assert_allclose(frame[~steep, 0], expected[~steep], atol=1e-4)
  np.testing.assert_allclose(frame[steep, 0], expected[steep], atol=1e-2)


def test_parallel_axes_give_the_distance_of_the_axes():
  rng = np.random.default_rng(4)
  qpos = _pair_poses(rng, 100, spread=0.0)
  qpos[:, 10:14] = qpos[:, 3:7]
  shift = rng.uniform(-0.1, 0.1, (100, 3))
  qpos[:, 7:10] += shift
  xml = _TWO_BODIES.format(kind="capsule", size="0.1 0.3")
  model, results = _c_contacts(xml, qpos)
  dist, _, frame = _ours(collision.capsule_capsule, model, results)
  for i, (contacts, _, _) in enumerate(results):
    np.testing.assert_allclose(dist[i], min(c[0] for c in contacts), atol=_TOLERANCE)
    separation = dist[i] + 0.2
    # The angle of the axes in float32 is 1e-7, over a lever of up to 0.3 m.
    np.testing.assert_allclose(
      frame[i, 0], contacts[0][2][0], atol=2e-6 / max(separation, 1e-3)
    )


def test_coincident_capsules_give_a_finite_contact():
  qpos = np.zeros((1, 14))
  qpos[:, [3, 10]] = 1.0
  xml = _TWO_BODIES.format(kind="capsule", size="0.1 0.3")
  model, results = _c_contacts(xml, qpos)
  dist, _, frame = _ours(collision.capsule_capsule, model, results)
  np.testing.assert_allclose(dist, -0.2, atol=1e-6)
  np.testing.assert_allclose(frame[0] @ frame[0].T, np.eye(3), atol=1e-6)


@pytest.mark.parametrize("max_angle", [np.pi, 0.5, 1e-2])
@pytest.mark.parametrize("tilt", [0, 35])
def test_plane_capsule_equals_c_up_to_the_vertical(max_angle, tilt):
  rng = np.random.default_rng(5)
  n = 200
  qpos = np.zeros((n, 7))
  qpos[:, 0:3] = rng.uniform(-0.1, 0.1, (n, 3))
  angle, azimuth = rng.uniform(0, max_angle, n), rng.uniform(0, 2 * np.pi, n)
  qpos[:, 3] = np.cos(angle / 2)
  # The capsule leans away from the plane's normal by `angle`.
  lean = np.sin(angle / 2)[:, None] * np.stack([np.cos(azimuth), np.sin(azimuth)], 1)
  qpos[:, 4:6] = lean
  tilt_quat = np.array([np.cos(np.radians(tilt) / 2), np.sin(np.radians(tilt) / 2)])
  w, x, y = qpos[:, 3].copy(), qpos[:, 4].copy(), qpos[:, 5].copy()
  c, s = tilt_quat
  qpos[:, 3:7] = np.stack([c * w - s * x, c * x + s * w, c * y, s * y], axis=1)
  xml = _PLANE_AND_BODY.format(tilt=tilt)
  model, results = _c_contacts(xml, qpos)
  dist, pos, frame = _ours(collision.plane_capsule, model, results, with_plane=True)
  seen = 0
  for i, (contacts, _, _) in enumerate(results):
    touching = [k for k in range(2) if dist[i, k] < 0]
    if len(touching) != len(contacts):
      assert np.abs(dist[i]).min() < _TOLERANCE
      continue
    # The tangent is the direction of a projection of this length.
    lean = max(np.sin(angle[i]), 1e-4)
    for k, (c_dist, c_pos, c_frame) in zip(touching, contacts, strict=True):
      seen += 1
      np.testing.assert_allclose(dist[i, k], c_dist, atol=_TOLERANCE)
      np.testing.assert_allclose(pos[i, k], c_pos, atol=_TOLERANCE)
      np.testing.assert_allclose(frame[i, k], c_frame, atol=2e-6 + 5e-7 / lean)
  assert seen >= 100


def test_plane_capsule_exactly_upright_has_an_orthonormal_frame():
  eye, size = jnp.eye(3), jnp.array([0.1, 0.3, 0.0])
  _, _, frame = collision.plane_capsule(jnp.zeros(3), eye, jnp.zeros(3), eye, size)
  np.testing.assert_allclose(frame[0], [[0, 0, 1], [1, 0, 0], [0, 1, 0]], atol=1e-6)


# ------------------------------------------------------------- life of the correction


def _table():
  return dict(collision_driver._COLLISION_FUNC)


def test_the_dispatch_table_is_restored_after_use_nesting_and_errors():
  before = _table()
  with collision.corrections():
    inside = _table()
    with collision.corrections():
      pass
    assert _table() == inside
  assert _table() == before
  assert {k for k in before if before[k] is not inside[k]} == {
    (mjx.GeomType.PLANE, mjx.GeomType.CAPSULE),
    (mjx.GeomType.SPHERE, mjx.GeomType.CAPSULE),
    (mjx.GeomType.CAPSULE, mjx.GeomType.CAPSULE),
  }
  with pytest.raises(KeyError), collision.corrections():
    raise KeyError("a user's error")
  assert _table() == before


# Two capsules whose axes cross, and one that leans 10 degrees on the floor.
_SCENE = """
<mujoco>
  <worldbody>
    <geom type="plane" size="1 1 1"/>
    <body pos="0 0 2"><joint type="slide" axis="0 0 1"/>
      <geom type="capsule" size="0.1" fromto="-0.3 0 0 0.3 0 0"/></body>
    <body pos="0 0 2"><joint type="slide" axis="0 0 1"/>
      <geom type="capsule" size="0.1" fromto="0 0 -0.3 0.1 0 0.3"/></body>
    <body pos="0 2 0.35"><freejoint/>
      <geom type="capsule" size="0.1" fromto="-0.03 -0.03 -0.3 0.03 0.03 0.3"/></body>
    <body pos="0 4 2"><freejoint/><geom type="sphere" size="0.03"/></body>
    <body pos="0.013 4 2.05"><freejoint/>
      <geom type="capsule" size="0.03" fromto="-0.015 0 0 0.015 0 0"/></body>
  </worldbody>
</mujoco>"""


@pytest.fixture(scope="module")
def scene():
  """The scene's contacts by C, by stock MJX and by corrected MJX, keyed by geoms."""
  model = mujoco.MjModel.from_xml_string(_SCENE)
  data = mujoco.MjData(model)
  mujoco.mj_forward(model, data)
  mjx_model = mjx.put_model(model)
  # Only collision is compiled: the poses come from C.
  mjx_data = mjx.put_data(model, data)

  def contacts(contact, count):
    pairs = np.asarray(contact.geom)[:count]
    frame = np.asarray(contact.frame).reshape(-1, 3, 3)
    return {
      (int(a), int(b)): (float(contact.dist[i]), frame[i])
      for i, (a, b) in enumerate(pairs)
      if contact.dist[i] < 0
    }

  def by_mjx():
    run = jax.jit(lambda d: collision_driver.collision(mjx_model, d)._impl.contact)
    contact = run(mjx_data)
    return contacts(contact, len(contact.dist))

  with collision.corrections():
    corrected = by_mjx()
  return contacts(data.contact, data.ncon), by_mjx(), corrected


_CROSSING, _LEANING, _SHORT = (1, 2), (0, 3), (4, 5)


def test_mjx_with_the_corrections_finds_cs_contacts(scene):
  by_c, _, corrected = scene
  assert set(by_c) == set(corrected) >= {_CROSSING, _LEANING, _SHORT}
  for pair, (dist, frame) in by_c.items():
    np.testing.assert_allclose(corrected[pair][0], dist, atol=1e-6)
    np.testing.assert_allclose(corrected[pair][1], frame, atol=1e-5)


@pytest.mark.parametrize(
  "pair, place",
  [
    (_CROSSING, "the normal of crossing capsules"),
    (_LEANING, "the tangent of steep capsules on a plane"),
    (_SHORT, "the closest point on short capsules"),
  ],
)
def test_stock_mjx_still_needs_the_correction(scene, pair, place):
  by_c, stock, _ = scene
  difference = np.abs(stock[pair][1] - by_c[pair][1]).max()
  assert difference > 1e-4, (
    f"Stock MJX {collision.MJX_VERSION} now agrees with C MuJoCo in {place}: that "
    "correction in envs_mjx/collision.py can be removed for this version."
  )


def test_other_threads_keep_stock_mjx_while_a_context_is_open():
  pair = (mjx.GeomType.CAPSULE, mjx.GeomType.CAPSULE)
  calls = []

  def stock(m, d, key, geom):
    calls.append(threading.current_thread().name)

  stock.ncon = 1
  table = collision_driver._COLLISION_FUNC
  original = table[pair]
  table[pair] = stock
  try:
    with collision.corrections():
      other = threading.Thread(
        target=lambda: table[pair](None, None, None, None), name="other"
      )
      other.start()
      other.join()
    assert calls == ["other"] and table[pair] is stock
  finally:
    table[pair] = original


def test_an_unchecked_version_warns_and_a_strange_table_is_an_error():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    collision.check_version(collision.CHECKED_VERSIONS[-1])
  with pytest.warns(RuntimeWarning, match="2.9.9 is installed"):
    collision.check_version("2.9.9")
  pair = (mjx.GeomType.PLANE, mjx.GeomType.CAPSULE)
  table = collision_driver._COLLISION_FUNC
  original = table.pop(pair)
  try:
    with pytest.raises(RuntimeError, match="install one of"), collision.corrections():
      pass
  finally:
    table[pair] = original
