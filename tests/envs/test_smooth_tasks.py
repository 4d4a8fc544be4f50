"""Acrobot, finger, fish, pendulum, point mass and reacher: what recordings leave open.

Whole agent steps, observations, rewards and reset distributions are compared with
recordings in tests/parity; here are rejection rules, simplified collisions and
rewards on both sides of their edges.
"""

import types

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import envs_mjx
from envs_mjx.suite import finger, fish, reacher

# ----------------------------------------------------------------------- finger


@pytest.fixture(scope="module")
def finger_task():
  return envs_mjx.make("finger-turn-easy").task


def _random_fingers(model, count):
  """Joints f64[count, 3] as resets draw them, before any is rejected."""
  low, high = model.jnt_range.T.copy()
  low[2], high[2] = -np.pi, np.pi
  return np.random.default_rng(0).uniform(low, high, (count, 3))


def _contacts(model, data):
  """Geom pairs in contact, by name."""
  names = [model.geom(g).name for g in range(model.ngeom)]
  return [{names[g] for g in contact.geom} for contact in data.contact]


def test_finger_touches_where_c_finds_a_contact_and_nothing_else_does(finger_task):
  model = finger_task.physics.model
  data = mujoco.MjData(model)
  poses = _random_fingers(model, 3000)
  touching = []
  for pose in poses:
    data.qpos[:] = pose
    mujoco.mj_fwdPosition(model, data)
    pairs = _contacts(model, data)
    assert all(pair <= set(finger._COLLIDING) for pair in pairs)
    assert len(pairs) <= 2 < finger._MAX_CONTACTS
    touching.append(bool(pairs))
  ours = np.asarray(jax.jit(jax.vmap(finger._touches))(jnp.float32(poses)))
  np.testing.assert_array_equal(ours, touching)
  share = np.mean(touching)
  assert abs(share - 0.094) < 5 * np.sqrt(0.094 / len(poses))
  assert 0.094**finger._MAX_DRAWS < 1e-9


def test_finger_starts_without_contact_and_with_the_target_on_its_circle(finger_task):
  keys = jax.random.split(jax.random.key(1), 3000)
  start = jax.jit(jax.vmap(finger_task.initialize))(keys)
  assert not np.any(jax.vmap(finger._touches)(start.qpos))
  target = np.asarray(start.params["site_pos.target"])
  radius = np.linalg.norm(target - [0.2, 0.0, 0.4], axis=1)
  np.testing.assert_allclose(radius, 0.13, rtol=1e-5)
  # Where the target is says nothing about where the body is.
  angle = np.arctan2(target[:, 0] - 0.2, target[:, 2] - 0.4)
  correlation = np.corrcoef(angle, start.qpos[:, 2])[0, 1]
  assert abs(correlation) < 5 / np.sqrt(3000)


def test_only_the_spinning_finger_has_the_stiffer_hinge():
  spin, turn = (envs_mjx.make(f"finger-{name}").task for name in ("spin", "turn-hard"))
  assert spin.physics.stepped.dof_damping[2] == 0.03
  assert turn.physics.stepped.dof_damping[2] != 0.03


# ------------------------------------------------------------------------- fish


def test_no_fish_target_lies_near_a_wall():
  task = envs_mjx.make("fish-obstacles").task
  keys = jax.random.split(jax.random.key(2), 4000)
  target = np.asarray(jax.jit(jax.vmap(task.draw_target))(keys))
  rng = np.random.default_rng(2)
  drawn = rng.uniform(fish._TARGET_LOW, fish._TARGET_HIGH, (60_000, 3))
  near = np.abs(np.abs(drawn[:, :2]) - 0.15) < 0.08
  drawn = drawn[~near.any(axis=1)]
  gap = np.abs(np.abs(target[:, :2]) - 0.15)
  assert gap.min() > 0.08 - 1e-6
  for share in (0.05, 0.2, 0.5, 0.8, 0.95):
    below = np.mean(target <= np.quantile(drawn, share, axis=0), axis=0)
    np.testing.assert_allclose(below, share, atol=0.04)


def test_a_fish_is_as_upright_whatever_the_length_of_its_quaternion():
  task = envs_mjx.make("fish-upright").task
  unit = np.array([0.8, 0.6, 0.0, 0.0])  # turned by 73.74 degrees: cosine 0.28
  views = [_view(**_fish([0, 0, 0], scale * unit)) for scale in (0.9, 1.0, 1.1)]
  rewards = [task.reward(view) for view in views]
  np.testing.assert_allclose(rewards, 0.1 ** (0.72**2), rtol=1e-5)


# ---------------------------------------------------------------------- reacher


@pytest.mark.parametrize("num_links", [2, 3, 4])
def test_reach_agrees_with_the_models_kinematics(num_links):
  task = reacher.Reach(0.015, num_links)
  model = task.physics.model
  data = mujoco.MjData(model)
  rng = np.random.default_rng(num_links)
  for _ in range(5):
    data.qpos[:] = rng.uniform(-1, 1, num_links)
    mujoco.mj_kinematics(model, data)
    target = {"geom_pos.target": jnp.array([0.1, -0.05, 0.01])}
    view = _view(qpos=data.qpos, qvel=np.zeros(num_links), params=target)
    expected = np.array([0.1, -0.05]) - data.geom("finger").xpos[:2]
    observed = task.observation(view)[num_links : num_links + 2]
    np.testing.assert_allclose(observed, expected, atol=1e-6)


# ------------------------------------------------------- rewards worked out by hand


def _view(qpos=(), qvel=(), ctrl=(), params=None):
  """The parts of a view that these tasks read."""
  return types.SimpleNamespace(
    qpos=jnp.array(qpos, jnp.float32),
    qvel=jnp.array(qvel, jnp.float32),
    ctrl=jnp.array(ctrl, jnp.float32),
    params={k: jnp.array(v, jnp.float32) for k, v in (params or {}).items()},
  )


def _turned(degrees):
  """The target of finger-turn, so far from above the hinge."""
  angle = np.deg2rad(degrees)
  position = [0.2 + 0.13 * np.sin(angle), 0.0, 0.4 + 0.13 * np.cos(angle)]
  return {"params": {"site_pos.target": position}, "qpos": [0.0] * 3}


def _fish(target, quaternion=(1, 0, 0, 0)):
  """A fish whose mouth is at (0, 0.0745, 0.1) where it is upright, and its target."""
  qpos = [0.0, 0.0, 0.1, *quaternion] + [0.0] * 7
  return {"qpos": qpos, "params": {"geom_pos.target": target}}


_REACH = {"qpos": [0.0] * 3, "params": {"geom_pos.target": [0.32, 0.0, 0.01]}}


@pytest.mark.parametrize(
  "name, view, reward",
  [
    ("acrobot-swingup", {"qpos": [0.0, 0.0]}, 1.0),
    # Folded at the shoulder: the tip is 2 m from the target, 1.8 margins off.
    ("acrobot-swingup", {"qpos": [0.0, np.pi]}, 0.1**3.24),
    ("acrobot-swingup-sparse", {"qpos": [0.0, 0.19]}, 1.0),
    ("acrobot-swingup-sparse", {"qpos": [0.0, 0.21]}, 0.0),
    ("finger-spin", {"qvel": [0, 0, -15.001]}, 1.0),
    ("finger-spin", {"qvel": [0, 0, -14.999]}, 0.0),
    ("finger-spin", {"qvel": [0, 0, 20]}, 0.0),
    # Chords of 0.07 m and 0.03 m on a circle of 0.13 m: 31.24 and 13.25 degrees.
    ("finger-turn-easy", _turned(31.2), 1.0),
    ("finger-turn-easy", _turned(-31.3), 0.0),
    ("finger-turn-hard", _turned(-13.2), 1.0),
    ("finger-turn-hard", _turned(13.3), 0.0),
    ("fish-upright", _fish([0, 0, 0]), 1.0),
    ("fish-upright", _fish([0, 0, 0], (0, 1, 0, 0)), 1e-4),
    ("fish-swim", _fish([0.0, 0.0745, 0.144]), 1.0),
    ("fish-swim", _fish([0.0, 0.0745, 0.235]), 1.7 / 8),
    ("fish-swim", _fish([0.0, -0.0745, 0.1], (0, 1, 0, 0)), 7 / 8),
    ("fish-obstacles", _fish([0.0, 0.0745, 0.1]), 1.0),
    ("pendulum-spin", {"qvel": [-4.5]}, 0.5),
    ("pendulum-spin", {"qvel": [12.0]}, 1.0),
    ("pointmass-easy", {"qpos": [0.0, 0.015], "ctrl": [1.0, 0.5]}, 4.375 / 5),
    ("pointmass-easy", {"qpos": [0.018, 0.024], "ctrl": [0.0, 0.0]}, 0.1),
    ("reacher-three-easy", _REACH, 1.0),
    ("reacher-three-hard", _REACH, 0.0),
  ],
)
def test_rewards(name, view, reward):
  got = envs_mjx.make(name).task.reward(_view(**view))
  np.testing.assert_allclose(got, reward, atol=1e-5)


def test_a_fish_near_a_wall_earns_nothing():
  task = envs_mjx.make("fish-obstacles").task
  for x, earns in [(0.0, True), (0.089, True), (0.091, False), (-0.2, False)]:
    view = _fish([x, 0.0745, 0.1])
    view["qpos"][0] = x
    assert (float(task.reward(_view(**view))) > 0.9) == earns
