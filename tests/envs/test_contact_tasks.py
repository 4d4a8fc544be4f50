"""Cheetah, walker, hopper and ball in cup: resets and readings against C MuJoCo.

Whole agent steps, observations, rewards and reset distributions are compared with
recordings in tests/parity; here are the things those cannot single out.
"""

import types

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from dm_control import suite

import envs_mjx
from envs_mjx import randomize
from envs_mjx.suite import ball_in_cup

# ----------------------------------------------------------------- drawn joints


def test_drawn_joints_fill_their_ranges_and_slides_stay():
  task = envs_mjx.make("walker-walk").task
  keys = jax.random.split(jax.random.key(0), 2000)
  model = task.physics.model
  draw = jax.jit(
    jax.vmap(lambda key: randomize.limited_and_rotational_joints(key, model))
  )
  qpos = np.asarray(draw(keys))
  assert qpos.dtype == np.float32
  assert np.all(qpos[:, :2] == 0.0)
  low, high = model.jnt_range[2:].T.copy()
  low[0], high[0] = -np.pi, np.pi
  scaled = (qpos[:, 2:] - low) / (high - low)
  assert scaled.min() >= 0.0 and scaled.max() <= 1.0
  np.testing.assert_allclose(scaled.mean(axis=0), 0.5, atol=0.04)
  np.testing.assert_allclose(scaled.std(axis=0), np.sqrt(1 / 12), atol=0.02)
  correlation = np.corrcoef(scaled.T) - np.eye(7)
  assert np.abs(correlation).max() < 0.12


def _one_body(joint):
  return mujoco.MjModel.from_xml_string(
    f"<mujoco><worldbody><body pos='1 2 3'>{joint}<geom size='1'/></body>"
    "</worldbody></mujoco>"
  )


def test_ball_joints_are_refused_by_name():
  model = _one_body("<joint name='root' type='ball'/>")
  with pytest.raises(ValueError, match="'root'"):
    randomize.limited_and_rotational_joints(jax.random.key(0), model)


def test_free_joints_stay_in_place_and_turn_as_dm_control_turns_them():
  model = _one_body("<freejoint name='root'/>")
  keys = jax.random.split(jax.random.key(0), 4000)
  qpos = jax.vmap(lambda k: randomize.limited_and_rotational_joints(k, model))(keys)
  np.testing.assert_array_equal(qpos[:, :3], np.tile([1.0, 2.0, 3.0], (4000, 1)))
  quaternion = np.asarray(qpos[:, 3:])
  np.testing.assert_allclose(np.linalg.norm(quaternion, axis=1), 1.0, rtol=1e-6)
  drawn = np.random.default_rng(0).random((100_000, 4))
  drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
  for share in (0.05, 0.5, 0.95):
    np.testing.assert_allclose(
      np.quantile(quaternion, share, axis=0), np.quantile(drawn, share), atol=0.03
    )


# ------------------------------------------------------------------ ball in cup


@pytest.fixture(scope="module")
def cup():
  return envs_mjx.make("cup-catch").task


def test_closed_form_contact_of_ball_and_cup_equals_cs(cup):
  rng = np.random.default_rng(0)
  balls = rng.uniform([-0.2, 0.2], [0.2, 0.5], (2000, 2))
  model = cup.physics.model
  data = mujoco.MjData(model)
  touching = []
  for ball in balls:
    data.qpos[:] = 0.0
    data.qpos[2:] = ball
    mujoco.mj_fwdPosition(model, data)
    touching.append(data.ncon > 0)
  ours = np.asarray(cup.touches_cup(jnp.float32(balls)))
  np.testing.assert_array_equal(ours, touching)
  accepted = 1.0 - np.mean(touching)
  assert abs(accepted - 0.827) < 0.03
  assert (1.0 - 0.827) ** ball_in_cup._MAX_DRAWS < 1e-9


def test_ball_is_in_the_cup_where_the_box_of_cup_starts_says(cup):
  rng = np.random.default_rng(1)
  everywhere = np.float32(rng.uniform([-0.2, 0.2], [0.2, 0.5], (20000, 2)))
  qpos = np.concatenate([np.zeros_like(everywhere), everywhere], axis=1)
  inside = np.asarray(jax.vmap(cup.in_target)(qpos)) > 0
  wanted = everywhere[inside & ~np.asarray(cup.touches_cup(everywhere))]
  assert len(wanted) > 100
  low, high = np.array(ball_in_cup._IN_CUP)
  assert np.all(wanted >= low) and np.all(wanted <= high)
  boxed = np.float32(rng.uniform(low, high, (20000, 2)))
  free = ~np.asarray(cup.touches_cup(boxed))
  assert abs(free.mean() - 0.976) < 0.01
  qpos = np.concatenate([np.zeros_like(boxed), boxed], axis=1)
  assert np.all(np.asarray(jax.vmap(cup.in_target)(qpos))[free] == 1.0)


def test_first_accepted_takes_the_first_or_else_the_last():
  candidates = jnp.arange(8.0).reshape(4, 2)
  accepted = jnp.array([False, True, True, False])
  np.testing.assert_array_equal(
    randomize.first_accepted(candidates, accepted), [2.0, 3.0]
  )
  np.testing.assert_array_equal(
    randomize.first_accepted(candidates, jnp.zeros(4, bool)), [6.0, 7.0]
  )


@pytest.mark.parametrize("name, in_cup", [("cup-catch", 0.014), ("cup-spin", 0.9014)])
def test_ball_starts_free_and_in_the_cup_as_often_as_in_dm_control(name, in_cup):
  task = envs_mjx.make(name).task
  keys = jax.random.split(jax.random.key(2), 4000)
  qpos = np.asarray(jax.jit(jax.vmap(lambda key: task.initialize(key).qpos))(keys))
  assert np.all(qpos[:, :2] == 0.0)
  assert not np.any(task.touches_cup(qpos[:, 2:]))
  share = np.mean(np.asarray(jax.vmap(task.in_target)(qpos)))
  assert abs(share - in_cup) < 5 * np.sqrt(in_cup * (1 - in_cup) / 4000)


# ------------------------------------------------------- rewards worked out by hand


def _view(task, speed=0.0, heights=(), qpos=(), qvel=(), ctrl=()):
  """The parts of a view that rewards read; heights of bodies by name, in metres."""
  model = task.physics.model
  height = np.zeros((model.nbody, 3), np.float32)
  for body, z in dict(heights).items():
    height[model.body(body).id, 2] = z
  sensordata = np.zeros(model.nsensordata, np.float32)
  if model.nsensordata:
    sensordata[task.physics.sensor("torso_subtreelinvel").start] = speed
  return types.SimpleNamespace(
    qpos=jnp.array(qpos, jnp.float32),
    qvel=jnp.array(qvel, jnp.float32),
    ctrl=jnp.array(ctrl, jnp.float32),
    sensordata=jnp.array(sensordata),
    data=types.SimpleNamespace(xpos=jnp.array(height), xipos=jnp.array(height)),
  )


_LOW_TORSO = {"torso": 0.6, "bfoot": 1.3, "ffoot": 0.0}
_UPRIGHT = [0.0] * 9
_FALLEN = [-0.7, 0.0, np.pi] + [0.0] * 6


@pytest.mark.parametrize(
  "name, view, reward",
  [
    ("cheetah-run", {"speed": 4.0}, 0.4),
    ("cheetah-run", {"speed": -4.0}, 0.0),
    ("cheetah-run-backwards", {"speed": -4.0}, 0.5),
    ("cheetah-run-backwards", {"speed": -9.0}, 1.0),
    # Torso one margin below 1.2 m is worth 0.1; bfoot is high, ffoot two margins low.
    ("cheetah-run-front", {"speed": 3.0, "heights": _LOW_TORSO}, 0.64 * 3.5 / 6),
    ("cheetah-run-back", {"heights": _LOW_TORSO}, (3e-4 + 0.2) / 5 / 6),
    ("cheetah-jump", {"heights": {"torso": 1.4, "bfoot": 1.1, "ffoot": 1.0}}, 1.0),
    ("cheetah-jump", {"speed": 0.75}, (5 * 1e-4 + 0.5) / 6),
    ("walker-stand", {"qpos": _UPRIGHT}, 1.0),
    ("walker-stand", {"qpos": _FALLEN}, 0.75 * 0.1),
    ("walker-walk", {"qpos": _UPRIGHT, "speed": 0.5}, 3.5 / 6),
    ("walker-run", {"qpos": _UPRIGHT, "speed": -1.0}, 1 / 6),
    ("walker-walk-backwards", {"qpos": _UPRIGHT, "speed": -2.0}, 1.0),
    ("walker-run-backwards", {"qpos": _UPRIGHT, "speed": -2.0}, 2.25 / 6),
    ("hopper-stand", {"heights": {"torso": 1.0}, "ctrl": [0.5, 0, 0, 1]}, 4.6875 / 5),
    ("hopper-stand", {"heights": {"torso": 0.5}, "ctrl": [0.0] * 4}, 0.0),
    ("hopper-hop", {"heights": {"torso": 1.0}, "speed": 1.0}, 0.5),
    ("hopper-hop-backwards", {"heights": {"torso": 1.0}, "speed": -0.5}, 0.5),
    ("hopper-hop-backwards", {"heights": {"torso": 2.5}, "speed": -0.5}, 0.0),
    ("cup-catch", {"qpos": [0.1, 0.0, 0.12, 0.35]}, 1.0),
    ("cup-catch", {"qpos": [0.1, 0.0, 0.13, 0.35]}, 0.0),
    ("cup-spin", {"qpos": [0.0, 0.1, 0.0, 0.45], "qvel": [0, 0, 9, 0]}, 0.0),
    ("cup-spin", {"qpos": [0.0, 0.0, 0.0, 0.1], "qvel": [9, 9, 0, -3]}, 0.5),
  ],
)
def test_rewards(name, view, reward):
  task = envs_mjx.make(name).task
  got = task.reward(_view(task, **view))
  np.testing.assert_allclose(got, reward, atol=1e-5)


# ------------------------------------------------------------ settling of cheetah


@pytest.mark.slow
def test_cheetah_settles_as_dm_control_does_its_stale_first_substep_included():
  ours = envs_mjx.make("cheetah-run").task
  keys = jax.random.split(jax.random.key(3), 16)
  model = ours.physics.model
  poses = np.array(
    jax.vmap(lambda key: randomize.limited_and_rotational_joints(key, model))(keys)
  )
  poses[:, :3] = 0.0
  start = jax.jit(jax.vmap(ours.settle))(poses)
  physics = suite.load("cheetah", "run").physics
  expected, warmstart = [], []
  for pose in poses:
    with physics.reset_context():
      pass
    physics.data.qpos[:] = pose
    physics.step(nstep=200)
    expected.append(np.concatenate([physics.data.qpos, physics.data.qvel]))
    warmstart.append(physics.data.qacc_warmstart.copy())
  got = np.concatenate([start.qpos, start.qvel], axis=1)
  np.testing.assert_allclose(got, expected, atol=2e-4)
  assert np.median(np.abs(got - expected)) < 1e-5
  warmstart_error = np.abs(np.asarray(start.qacc_warmstart) - np.array(warmstart))
  assert np.median(warmstart_error) < 1e-3


# -------------------------------------------------------------- readings of hopper


@pytest.mark.slow
def test_hopper_feels_touch_one_substep_late():
  reference = suite.load("hopper", "hop", task_kwargs={"random": 4})
  rng = np.random.default_rng(4)
  starts, actions, late, fresh = [], [], [], []
  for _ in range(12):
    reference.reset()
    for _ in range(60):  # to the floor
      reference.step(rng.uniform(-0.3, 0.3, 4))
    data = reference.physics.data
    starts.append([x.copy() for x in (data.qpos, data.qvel, data.qacc_warmstart)])
    actions.append(rng.uniform(-1, 1, 4))
    late.append(reference.step(actions[-1]).observation["touch"])
    fresh.append(_fresh_touch(reference.physics))
  assert np.abs(np.array(late) - fresh).max() > 0.1  # so that a fresh one would show

  physics = envs_mjx.make("hopper-hop").task.physics
  zero = jnp.zeros(physics.model.nsensordata, jnp.float32)
  touch = physics.sensor("touch_toe").start, physics.sensor("touch_heel").start

  def touch_after(qpos, qvel, warmstart, action):
    state = envs_mjx.PhysicsState(
      qpos, qvel, jnp.zeros(0), warmstart, jnp.float32(0.0), zero
    )
    state, _ = physics.control_step(state, action)
    return jnp.log1p(state.sensordata[jnp.array(touch)])

  stacked = [np.float32(x) for x in (*zip(*starts, strict=True), actions)]
  got = np.asarray(jax.jit(jax.vmap(touch_after))(*stacked))
  np.testing.assert_allclose(got, late, atol=2e-3)


def _fresh_touch(physics) -> np.ndarray:
  """Touch readings as a forward pass at the present state would give them."""
  data = mujoco.MjData(physics.model.ptr)
  data.qpos, data.qvel = physics.data.qpos, physics.data.qvel
  data.ctrl = physics.data.ctrl
  mujoco.mj_forward(physics.model.ptr, data)
  return np.log1p(data.sensordata[3:5])
