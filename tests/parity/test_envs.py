"""Environments against recordings of dm_control on C MuJoCo.

One item per task and part: the model's fields; observations and rewards of recorded
states; one agent step from every recorded start; readings of the acceleration stage
at a reset; the distribution of resets. Bounds follow from what float32 MJX reaches
and from the recordings' own sensitivity to noise, never from our error.
"""

import functools
import json

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import envs_mjx
from envs_mjx.base import PhysicsState

from . import golden

# States are handed to compiled functions in chunks of this many, so that recordings of
# any length share a compilation.
_CHUNK = 64
_RESET_CHUNK = 512
_EPS = float(np.finfo(np.float32).eps)

# One agent step: bounds on qpos (absolute) and on qvel, observation (relative to
# 1 + |value|), without and with contact.
_QPOS_BOUND = 1e-5
_QVEL_BOUND = {False: 1e-4, True: 3e-4}
# Where a three-dimensional body makes contact or strikes a joint limit it amplifies
# rounding so much that single steps say little (an ankle of the humanoid at its limit:
# 1e-6 rad before, 1e-5 after): nine in ten must keep the bounds. Bodies that never
# touch anything (fish) keep them always.
_SHARE_3D = 0.9
_REWARD_BOUND = 2e-5

_DEVIATIONS = ("f32_qpos", "f32_qvel", "e5_obs", "e5_reward")

# Left out: solver iterations, energy flag and other settings that MJX has us change.
_COMPARED_OPTIONS = (
  "timestep", "integrator", "cone", "solver", "gravity", "density", "viscosity",
  "impratio", "tolerance", "ls_tolerance", "disableflags", "wind", "magnetic",
)  # fmt: skip
_NO_CONTACT = 1 << 4 | 1 << 0  # mjDSBL_CONTACT, mjDSBL_CONSTRAINT


def pytest_generate_tests(metafunc):
  paths = golden.files(metafunc.config.getoption("--golden-dir"), "envs")
  if "recording" in metafunc.fixturenames:
    ids = [path.stem for path in paths]
    metafunc.parametrize("recording", paths, ids=ids, indirect=True)


class Recording:
  """One task's file: arrays by key, its meta data and our environment."""

  def __init__(self, path):
    self.arrays = dict(np.load(path, allow_pickle=False))
    self.meta = json.loads(str(self.arrays["meta/json"]))
    self.name = self.meta["name"]
    self.env = _environment(self.name)
    self.physics = self.env.task.physics

  def __getitem__(self, key):
    return self.arrays[key]

  def params(self, prefix: str) -> dict[str, np.ndarray]:
    """The task's parameters that vary from reset to reset, by our names."""
    random = {k for k, v in self.meta["params"].items() if v["kind"] == "random"}
    return {k: np.float32(self[f"{prefix}/param/{k}"]) for k in sorted(random)}

  def states(self, prefix: str, suffix: str = "") -> PhysicsState:
    """Recorded physics states, stacked; readings are zero where none were recorded."""

    def field(name, size):
      key = f"{prefix}/{name}{suffix}"
      if key in self.arrays:
        return np.float32(self[key])
      return np.zeros((count, size), np.float32)

    count = self[f"{prefix}/qpos{suffix}"].shape[0]
    model = self.physics.model
    readings = field("sensordata", model.nsensordata)
    if not self.physics.acceleration_sensors:
      readings = readings[:, :0]
    return PhysicsState(
      qpos=field("qpos", model.nq),
      qvel=field("qvel", model.nv),
      act=field("act", model.na),
      qacc_warmstart=field("qacc_warmstart", model.nv),
      time=np.zeros(count, np.float32),
      sensordata=readings,
    )


@functools.cache
def _environment(name):
  return envs_mjx.make(name)


@functools.cache
def _recording(path):
  return Recording(path)


@pytest.fixture
def recording(request) -> Recording:
  if request.param.stem not in envs_mjx.ALL_TASKS:
    pytest.skip(f"envs_mjx has no task {request.param.stem} yet")
  return _recording(request.param)


# ------------------------------------------------------------- compiled pieces


@functools.cache
def _control_step(physics):
  """Shared by all tasks of a domain, for it is what takes long to compile."""
  return jax.jit(jax.vmap(physics.control_step))


@functools.cache
def _initial(physics):
  return jax.jit(jax.vmap(physics.initial))


def _initial_states(physics, qpos, qvel, act):
  return _in_chunks(_initial(physics), qpos, qvel, act, chunk=_RESET_CHUNK)


@functools.cache
def _observe_and_reward(name):
  task = _environment(name).task

  def one(state, ctrl, params):
    view = task.physics.view(state, ctrl, params)
    return task.observation(view), task.reward(view)

  return jax.jit(jax.vmap(one))


def _in_chunks(function, *args, chunk=_CHUNK):
  """Calls a batched function on equal chunks; the last is filled by repetition."""
  count = jax.tree.leaves(args)[0].shape[0]
  index = np.arange(-(-count // chunk) * chunk) % count

  def call(part):
    return function(*jax.tree.map(lambda x: np.asarray(x)[part], args))

  parts = [call(part) for part in index.reshape(-1, chunk)]
  return jax.tree.map(lambda *x: np.concatenate(x)[:count], *parts)


def _evaluate(recording, state, ctrl, params):
  one = _observe_and_reward(recording.name)
  return _in_chunks(one, state, np.float32(ctrl), params)


def _assert_within(what, got, expected, bound, optional=None):
  """Bound is an array like the error; says which entry is worst, and by how much.

  Of the rows marked in bool[K] `optional`, the worst tenth may break the bound.
  """
  error = np.abs(np.asarray(got, np.float64) - expected)
  bound = np.broadcast_to(bound, error.shape)
  ratio = np.where(np.isnan(error), np.inf, error / bound)
  if optional is not None and optional.any():
    row = ratio.reshape(ratio.shape[0], -1).max(axis=1)
    limit = np.quantile(row[optional], _SHARE_3D, method="higher")
    spared = optional & (row > limit)
    ratio[spared] = 0.0
  worst = np.unravel_index(np.argmax(ratio), ratio.shape)
  assert ratio[worst] <= 1.0, (
    f"{what}{list(map(int, worst))}: off by {error[worst]:.2e}, allowed "
    f"{bound[worst]:.2e}; {np.sum(ratio > 1)} of {ratio.size} entries are out of bounds"
  )


# ------------------------------------------------------------------- the parts


def test_model(recording):
  """Sizes, options and compiled constants are those of the recorded model."""
  meta, model, spec = recording.meta, recording.physics.model, recording.env.spec
  for size in ("nq", "nv", "nu", "na", "nbody", "njnt", "nsensordata", "ntendon"):
    assert getattr(model, size) == meta[size], size
  assert spec.obs_size == meta["obs_dim"]
  assert spec.action_size == meta["action_dim"]
  assert spec.episode_length == meta["agent_episode_steps"]
  assert spec.action_repeat == meta["action_repeat"]
  assert recording.physics.n_substeps == meta["n_sub_steps"]
  assert spec.control_timestep == pytest.approx(meta["control_timestep"])
  for option in _COMPARED_OPTIONS:
    np.testing.assert_allclose(
      getattr(model.opt, option), meta["opt"][option], err_msg=option
    )
  contact_free = meta["opt"]["disableflags"] & _NO_CONTACT
  for key in recording.arrays:
    field = key.removeprefix("model/")
    if not key.startswith("model/") or not hasattr(model, field):
      continue
    if contact_free and field in ("geom_contype", "geom_conaffinity"):
      continue
    ours, recorded = np.array(getattr(model, field)), recording[key]
    if field == "geom_size":  # of planes it is for rendering: they collide everywhere
      solid = model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE
      ours, recorded = ours[solid], recorded[solid]
    if field == "dof_damping":  # dm_control's reset of one task sets it
      recorded = recorded.copy()
      for name in recording.meta["params"]:
        if name.startswith("dof_damping."):
          dof = model.joint(name.removeprefix("dof_damping.")).dofadr[0]
          recorded[dof] = recording[f"step/param/{name}"][0]
    np.testing.assert_allclose(ours, recorded, rtol=1e-9, atol=1e-12, err_msg=field)


def test_action_scaling(recording):
  ctrl = jax.vmap(recording.env.control)(jnp.asarray(recording["step/action"]))
  np.testing.assert_allclose(ctrl, recording["step/ctrl"], rtol=1e-6, atol=1e-7)


def test_observation_of_recorded_states(recording):
  """Recorded readings included, every entry is a function of the recorded state."""
  for prefix, suffix, obs_key in [
    ("step", "0", "step/obs0"),
    ("step", "1", "step/obs1"),
    ("reset", "", "reset/obs"),
  ]:
    state = recording.states(prefix, suffix)
    ctrl = np.zeros((state.time.size, recording.physics.model.nu))
    obs, _ = _evaluate(recording, state, ctrl, recording.params(prefix))
    bound = 1e-6 * (1 + np.abs(recording[obs_key])) + _rounding(state)
    _assert_within(obs_key, obs, recording[obs_key], bound)


def _rounding(state):
  """[K, 1]: what rounding the state's angles and speeds to float32 can do."""
  largest = np.maximum(
    np.abs(state.qpos).max(axis=1), 0.1 * np.abs(state.qvel).max(axis=1)
  )
  return _EPS * np.maximum(largest, 1.0)[:, None]


def test_reward_of_recorded_states(recording):
  """The first control step's reward from the middle, the second's from the end."""
  ctrl, params = recording["step/ctrl"], recording.params("step")
  first = recording["step/reward_first"]
  expected = {"_mid": first, "1": recording["step/reward"] - first}
  if recording.meta["reward_from_acc_stage_sensors"]:
    del expected["_mid"]  # the readings in the middle were not recorded
  for suffix, reward in expected.items():
    state = recording.states("step", suffix)
    _, got = _evaluate(recording, state, ctrl, params)
    # Steep rewards magnify what rounding does to a height or a momentum.
    bound = 1e-6 + _rounding(state)[:, 0] + recording["step/dev_f32_reward"]
    _assert_within(f"reward{suffix}", got, reward, bound)


@pytest.mark.slow
def test_one_agent_step(recording):
  """Both control steps from every recorded start, with the recorded action."""
  ctrl, params = np.float32(recording["step/ctrl"]), recording.params("step")
  control_step = _control_step(recording.physics)
  middle, overflow_mid = _in_chunks(control_step, recording.states("step", "0"), ctrl)
  end, overflow_end = _in_chunks(control_step, middle, ctrl)
  _, reward_mid = _evaluate(recording, middle, ctrl, params)
  obs, reward_end = _evaluate(recording, end, ctrl, params)

  touches = recording["step/ncon_max"] > 0
  relative = np.where(touches, _QVEL_BOUND[True], _QVEL_BOUND[False])[:, None]
  free_body = recording.physics.model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
  optional = np.broadcast_to(free_body and touches.any(), touches.shape)
  within = functools.partial(_assert_within, optional=optional)
  dev = {k: recording[f"step/dev_{k}"] for k in _DEVIATIONS}
  for suffix, state in [("_mid", middle), ("1", end)]:
    qvel = recording[f"step/qvel{suffix}"]
    qpos_bound = _QPOS_BOUND + dev["f32_qpos"][:, None]
    qvel_bound = relative * (1 + np.abs(qvel)) + dev["f32_qvel"][:, None]
    name = f"qpos{suffix}"
    within(name, state.qpos, recording[f"step/{name}"], qpos_bound)
    within(f"qvel{suffix}", state.qvel, qvel, qvel_bound)
  expected = recording["step/obs1"]
  obs_bound = relative * (1 + np.abs(expected)) + dev["e5_obs"][:, None]
  within("obs1", obs, expected, obs_bound)
  reward_bound = _REWARD_BOUND + dev["e5_reward"]
  reward = reward_mid + reward_end
  within("reward", reward, recording["step/reward"], reward_bound)
  # Slots suffice: where fewer contacts than slots exist, none was left out.
  overflow = overflow_mid + overflow_end
  assert not np.any(overflow[recording["step/ncon_max"] < _fewest_slots(recording)])


def _fewest_slots(recording):
  slots = [s.stop - s.start for s in recording.physics.capped_slots]
  return min(slots, default=0)


@pytest.mark.slow
def test_readings_at_a_reset(recording):
  """Touch, force and the like are those of the reset state, actuators disabled."""
  physics = recording.physics
  if not physics.acceleration_sensors:
    pytest.skip("the task reads no sensor of the acceleration stage")
  state = recording.states("reset")
  got = _initial_states(physics, state.qpos, state.qvel, state.act)
  stale = physics.is_acceleration
  expected = recording["reset/sensordata"][:, stale]
  bound = 1e-3 * (1 + np.abs(expected))
  _assert_within("readings", got.sensordata[:, stale], expected, bound)


# ------------------------------------------------------- distribution of resets

_RESETS = 4096
_RESETS_WITH_SETTLING = 512
_SIGMAS = 5.0


@pytest.mark.slow
def test_reset_distribution(recording):
  """Mean, spread and quantiles of many resets lie within 5 standard errors."""
  settles = recording.meta["domain"] == "cheetah"
  count = _RESETS_WITH_SETTLING if settles else _RESETS
  keys = jax.random.split(jax.random.key(3), count)
  start = jax.jit(jax.vmap(recording.env.task.initialize))(keys)
  state = _initial_states(recording.physics, *start[:3])
  ctrl, params = np.zeros((count, recording.physics.model.nu)), start.params or {}
  obs, _ = _evaluate(recording, state, ctrl, params)
  samples = {"obs": obs, "qpos": state.qpos, "qvel": state.qvel}
  if recording.physics.model.na:
    samples["act"] = state.act
  samples |= {f"param/{k}": v for k, v in params.items()}
  assert set(params) == set(recording.params("reset"))
  for name, sample in samples.items():
    expected = {
      k: recording[f"resetstat/{name}_{k}"]
      for k in ("mean", "std", "q05", "q50", "q95")
    }
    sample = np.asarray(sample, np.float64)
    _compare_distributions(name, sample, expected, int(recording["resetstat/n"]))


def _compare_distributions(name, sample, expected, n_expected):
  n = sample.shape[0]
  per_sample = 1 / n + 1 / n_expected
  mean, std = sample.mean(axis=0), sample.std(axis=0)
  spread = np.maximum(std, expected["std"])
  rounding = 1e-5 * (1 + np.abs(expected["mean"]))
  error = _SIGMAS * spread * np.sqrt(per_sample) + rounding
  _assert_within(f"{name} mean", mean, expected["mean"], error)
  # Variance of a sample's standard deviation, by its kurtosis.
  scaled = (sample - mean) / np.maximum(std, 1e-12)
  kurtosis = np.maximum(np.mean(scaled**4, axis=0), 1.0)
  error = _SIGMAS * spread * np.sqrt(kurtosis / 4 * per_sample) + rounding
  _assert_within(f"{name} std", std, expected["std"], error)
  for quantile, p in [("q05", 0.05), ("q50", 0.5), ("q95", 0.95)]:
    # Share of our sample below their quantile; a tie may count on either side.
    below = np.mean(sample < expected[quantile] - rounding, axis=0)
    up_to = np.mean(sample <= expected[quantile] + rounding, axis=0)
    error = _SIGMAS * np.sqrt(p * (1 - p) * per_sample)
    _assert_within(f"{name} {quantile}", np.clip(p, below, up_to), p, error)
