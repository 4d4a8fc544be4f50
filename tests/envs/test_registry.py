"""Names, static descriptions, and the environment that a task makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_mjx
from envs_mjx.base import EnvSpec
from envs_mjx.physics import View
from envs_mjx.registry import canonical_name
from envs_mjx.suite.pendulum import SwingUp
from envs_mjx.task import TaskEnv


def test_tasks_are_sorted_and_listed_once():
  for names in (envs_mjx.TASKS, envs_mjx.EXTRA_TASKS):
    assert list(names) == sorted(names)
  assert len(set(envs_mjx.ALL_TASKS)) == len(envs_mjx.ALL_TASKS)
  assert "cheetah-run" in envs_mjx.TASKS
  assert "cheetah-flip" in envs_mjx.EXTRA_TASKS


@pytest.mark.parametrize(
  "spelling, name",
  [
    ("cup-catch", "cup-catch"),
    ("ball_in_cup-catch", "cup-catch"),
    ("ball_in_cup_catch", "cup-catch"),
    ("cartpole_swingup", "cartpole-swingup"),
    ("cartpole_balance_sparse", "cartpole-balance-sparse"),
    ("Walker-Run", "walker-run"),
    ("point_mass-easy", "pointmass-easy"),
  ],
)
def test_spellings(spelling, name):
  assert canonical_name(spelling) == name


def test_unknown_name_lists_near_misses():
  with pytest.raises(ValueError) as error:
    envs_mjx.make("cartpole-swingap")
  message = str(error.value)
  assert "'cartpole-swingap'" in message and "cartpole-swingup" in message
  assert "\n" not in message


def test_name_like_no_other_lists_all():
  with pytest.raises(ValueError) as error:
    envs_mjx.make("xyzzy")
  assert all(name in str(error.value) for name in envs_mjx.ALL_TASKS)


def test_spec():
  assert envs_mjx.make("pendulum-swingup").spec == EnvSpec(
    name="pendulum-swingup",
    obs_size=3,
    action_size=1,
    episode_length=500,
    action_repeat=2,
    control_timestep=0.02,
  )


def test_observation_of_another_size_than_declared_is_refused():
  class Wrong(SwingUp):
    obs_size = 4

  with pytest.raises(ValueError, match="obs_size"):
    jax.eval_shape(TaskEnv("wrong", Wrong()).reset, jax.random.key(0))


class _Effort(SwingUp):
  """Rewards the control, and the angle after each control step."""

  def reward(self, view: View) -> jax.Array:
    return view.ctrl[0] + 10.0 * view.qpos[0]


@pytest.fixture(scope="module")
def effort_env():
  env = TaskEnv("effort", _Effort())
  return env, jax.jit(env.reset), jax.jit(env.step)


def _pendulum(angle, speed, torque):
  """One control step in closed form: implicit damping, half-implicit Euler."""
  step, inertia = 0.02, 0.251
  force = torque + 4.905 * np.sin(angle) - 0.1 * speed
  speed = speed + step * force / (inertia + step * 0.1)
  return angle + step * speed, speed


def test_step_repeats_the_action_and_sums_rewards(effort_env):
  _, reset, step = effort_env
  state = reset(jax.random.key(1))
  angle, speed = float(state.physics.qpos[0]), 0.0
  for action in (0.7, -0.2):
    expected = 0.0
    for _ in range(2):
      angle, speed = _pendulum(angle, speed, action)
      expected += action + 10.0 * angle
    state = step(state, jnp.array([action]))
    assert float(state.reward) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(state.physics.qpos, [angle], rtol=1e-5)
    np.testing.assert_allclose(
      state.obs, [np.cos(angle), np.sin(angle), speed], rtol=1e-4, atol=1e-6
    )
  assert int(state.step) == 2 and float(state.physics.time) == pytest.approx(0.08)


def test_rewards_read_the_control_as_given_while_dynamics_clamp_it(effort_env):
  _, reset, step = effort_env
  start = reset(jax.random.key(2))
  inside, outside = step(start, jnp.array([1.0])), step(start, jnp.array([3.0]))
  np.testing.assert_array_equal(inside.physics.qpos, outside.physics.qpos)
  assert float(outside.reward - inside.reward) == pytest.approx(4.0, rel=1e-4)


def test_time_limit_truncates_and_nothing_terminates(effort_env):
  env, reset, step = effort_env
  state = reset(jax.random.key(3))
  last = state.replace(step=jnp.int32(env.spec.episode_length - 2))
  last = step(last, jnp.zeros(1))
  assert not last.truncated
  last = step(last, jnp.zeros(1))
  assert last.truncated and not last.terminated


def test_state_keeps_its_types_so_that_steps_compile_once(effort_env):
  env, reset, _ = effort_env
  state = reset(jax.random.key(4))
  traces = []
  step = jax.jit(lambda s, a: traces.append(1) or env.step(s, a))
  for _ in range(3):
    state = step(state, jnp.zeros(1))
  assert len(traces) == 1
  stepped = jax.eval_shape(env.step, state, jnp.zeros(1))
  jax.tree.map(lambda x, y: _same_type(x, y), state, stepped)
  assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


def _same_type(x, y):
  assert (x.shape, x.dtype) == (y.shape, y.dtype)
