"""The batch wrapper, on an environment whose answers are known without physics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from envs_mjx.base import EnvSpec, EnvState
from envs_mjx.wrappers import BatchEnv

LENGTH = 12
POISON = 99.0


@struct.dataclass
class _Body:
  draw: jax.Array
  sum_of_actions: jax.Array


class Probe:
  """Observes (its reset's draw, steps since, sum of actions); rewards the action.

  The second action ends the episode as a termination where it is positive; the action
  POISON makes the body NaN. Every execution of `reset` is counted.
  """

  def __init__(self):
    self.spec = EnvSpec(
      name="probe", obs_size=3, action_size=2, episode_length=LENGTH
    )
    self.resets = 0
    self.traces = 0

  def _count(self, draw):
    self.resets += 1

  def reset(self, key):
    draw = jax.random.uniform(key)
    jax.debug.callback(self._count, draw)
    body = _Body(draw=draw, sum_of_actions=jnp.float32(0))
    return EnvState(
      physics=body,
      task={},
      obs=self._observe(body, jnp.int32(0)),
      reward=jnp.float32(0),
      terminated=jnp.bool_(False),
      truncated=jnp.bool_(False),
      step=jnp.int32(0),
      contact_overflow=jnp.int32(0),
    )

  def step(self, state, action):
    self.traces += 1
    poison = jnp.where(action[0] == POISON, jnp.nan, 0.0)
    body = state.physics.replace(
      sum_of_actions=state.physics.sum_of_actions + action[0] + poison
    )
    step = state.step + 1
    return state.replace(
      physics=body,
      obs=self._observe(body, step),
      reward=action[0],
      terminated=action[1] > 0,
      truncated=step >= LENGTH,
      step=step,
    )

  def _observe(self, body, step):
    return jnp.stack([body.draw, jnp.float32(step), body.sum_of_actions])


class Runner:
  """A batch of probes, stepped by hand; each method returns numpy."""

  def __init__(self, n, seed=0, **settings):
    self.probe = Probe()
    self.batch = BatchEnv(self.probe, n, **settings)
    self._step = jax.jit(self.batch.step)
    self.state = jax.jit(self.batch.reset)(jax.random.key(seed))
    self.n = n

  @property
  def obs(self):
    return np.asarray(self.state.obs)

  def step(self, push=0.5, end=(), poison=()):
    action = np.zeros((self.n, 2), np.float32)
    action[:, 0] = push
    action[list(end), 1] = 1.0
    action[list(poison), 0] = POISON
    self.state, transition = self._step(self.state, action)
    return jax.tree.map(np.asarray, transition)

  def resets(self):
    jax.effects_barrier()
    count, self.probe.resets = self.probe.resets, 0
    return count


def test_true_last_observation_and_fresh_first_one():
  run = Runner(3)
  draws = run.obs[:, 0]
  for i in range(1, LENGTH + 1):
    out = run.step(push=0.5)
    np.testing.assert_array_equal(out.last_obs[:, 0], draws)
    np.testing.assert_array_equal(out.last_obs[:, 1], i)
    np.testing.assert_allclose(out.last_obs[:, 2], 0.5 * i)
  assert out.truncated.all() and out.done.all() and not out.terminated.any()
  np.testing.assert_allclose(out.episode_return, 0.5 * LENGTH)
  np.testing.assert_array_equal(out.episode_length, LENGTH)
  np.testing.assert_array_equal(run.obs[:, 1:], 0.0)
  assert not np.isin(run.obs[:, 0], draws).any()
  again = run.step(push=0.5)
  np.testing.assert_allclose(again.episode_return, 0.5)
  np.testing.assert_array_equal(again.episode_length, 1)


def test_every_draw_differs_over_environments_and_episodes():
  run = Runner(5)
  draws = [run.obs[:, 0]]
  for _ in range(6):
    run.step(end=range(5))
    draws.append(run.obs[:, 0])
  assert np.unique(np.concatenate(draws)).size == 35


def test_resets_cost_in_proportion_to_what_ended():
  run = Runner(10, reset_batch=2)
  assert run.resets() == 10
  run.step()
  assert run.resets() == 0
  for ended, executed in [([7], 2), ([0, 9], 2), ([1, 2, 3], 4), (range(10), 10)]:
    out = run.step(end=ended)
    assert out.terminated.sum() == len(ended)
    assert run.resets() == executed


def test_default_chunk_is_an_eighth_rounded_up():
  assert BatchEnv(Probe(), 9).reset_batch == 2
  assert BatchEnv(Probe(), 1).reset_batch == 1


@pytest.mark.parametrize("stagger", [False, True])
def test_chunk_size_changes_no_result(stagger):
  """An environment's draws are its own, however resets are packed."""
  runs = [Runner(7, reset_batch=c, stagger=stagger) for c in (1, 3, 7)]
  for t in range(2 * LENGTH):
    end = [i for i in range(7) if (3 * i + t) % 5 == 0]
    outs = [run.step(end=end, poison=[t % 7]) for run in runs]
    for run, out in zip(runs[1:], outs[1:], strict=True):
      np.testing.assert_array_equal(run.obs, runs[0].obs)
      np.testing.assert_array_equal(out.last_obs, outs[0].last_obs)


def test_only_what_ended_is_reset():
  run = Runner(6)
  before = run.obs
  run.step(end=[1, 4])
  kept = [0, 2, 3, 5]
  np.testing.assert_array_equal(run.obs[kept, 0], before[kept, 0])
  np.testing.assert_array_equal(run.obs[kept, 1], 1)
  np.testing.assert_array_equal(run.obs[[1, 4], 1], 0)


def test_lockstep_ends_together():
  run = Runner(4)
  for _ in range(3):
    for _ in range(LENGTH - 1):
      assert not run.step().done.any()
    assert run.step().done.all()


@pytest.mark.parametrize("n", [1, 4, 5, 30])
def test_stagger_spreads_first_ends_then_episodes_are_full(n):
  run = Runner(n, stagger=True)
  ends = [[] for _ in range(n)]
  for t in range(1, 3 * LENGTH + 1):
    out = run.step()
    assert not out.terminated.any()
    for i in np.flatnonzero(out.truncated):
      ends[i].append(t)
  for i, times in enumerate(ends):
    assert abs(times[0] - (i + 1) * LENGTH / n) < 1
    assert set(np.diff(times)) == {LENGTH}


def test_a_broken_environment_is_replaced_and_harms_no_other():
  run, clean = Runner(5), Runner(5)
  run.step(), clean.step()
  out = run.step(poison=[2])
  clean.step(end=[2])
  np.testing.assert_array_equal(out.bad, np.arange(5) == 2)
  np.testing.assert_array_equal(out.done, out.bad)
  assert not (out.terminated | out.truncated).any()
  assert out.reward[2] == 0 and not out.last_obs[2].any()
  assert out.episode_return[2] == pytest.approx(0.5) and out.episode_length[2] == 2
  for leaf in jax.tree.leaves((out, run.state.env)):
    assert np.isfinite(leaf).all()
  np.testing.assert_array_equal(run.obs, clean.obs)


def test_broken_at_the_time_limit_is_bad_and_not_truncated():
  run = Runner(2)
  for _ in range(LENGTH - 1):
    run.step()
  out = run.step(poison=[0])
  np.testing.assert_array_equal(out.truncated, [False, True])
  np.testing.assert_array_equal(out.bad, [True, False])
  assert out.done.all()


def test_one_trace_serves_all_steps_and_scan_equals_the_loop():
  run = Runner(4, stagger=True)
  first = run.state
  outs = [run.step() for _ in range(2 * LENGTH)]
  assert run.probe.traces == 1
  actions = np.zeros((2 * LENGTH, 4, 2), np.float32)
  actions[..., 0] = 0.5
  last, scanned = jax.lax.scan(run.batch.step, first, actions)
  expected = jax.tree.map(lambda *x: np.stack(x), *outs)
  jax.tree.map(np.testing.assert_array_equal, scanned, expected)
  np.testing.assert_array_equal(last.obs, run.obs)


def test_raw_keys_work_too():
  batch = BatchEnv(Probe(), 3)
  typed = jax.jit(batch.reset)(jax.random.key(5))
  raw = jax.jit(batch.reset)(jax.random.PRNGKey(5))
  np.testing.assert_array_equal(typed.obs, raw.obs)


@pytest.mark.parametrize(
  "settings, word", [({"num_envs": 0}, "num_envs"), ({"reset_batch": 5}, "reset_batch")]
)
def test_sizes_out_of_range_are_named(settings, word):
  with pytest.raises(ValueError, match=word):
    BatchEnv(Probe(), **({"num_envs": 4} | settings))
