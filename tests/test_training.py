"""The training loop: one compilation, no copies, and the order of its phases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjx_tdmpc2.evaluation import Evaluator
from mjx_tdmpc2.training import Phase, Trainer
from tests.probes import CountingEnv, small_run

SEED, TRAIN = Phase.seed(), Phase.train(updates=2)
ONE = jnp.int32(1)


@pytest.fixture(scope="module")
def trainer():
  return Trainer(small_run(), CountingEnv())


def start(trainer, seed_steps=4):
  """A state after the seed phase."""
  state = trainer.init(jax.random.key(3))
  return trainer.train_chunk(state, jnp.int32(seed_steps), SEED)


def assert_equal(a, b, rtol=0.0):
  """Asserts that two states agree in every leaf, keys included."""

  def numbers(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)

  paths = jax.tree_util.tree_leaves_with_path(a)
  for (path, x), y in zip(paths, jax.tree.leaves(b), strict=True):
    name = jax.tree_util.keystr(path)
    if rtol:
      np.testing.assert_allclose(numbers(x), numbers(y), rtol, 1e-6, err_msg=name)
    else:
      np.testing.assert_array_equal(numbers(x), numbers(y), err_msg=name)


def test_chunk_lengths_change_nothing_and_compile_once(trainer):
  whole = trainer.train_chunk(start(trainer), jnp.int32(10), TRAIN)
  parts = start(trainer)
  for steps in (1, 6, 3):
    parts = trainer.train_chunk(parts, jnp.int32(steps), TRAIN)
  assert_equal(whole, parts)
  assert int(whole.vector_steps) == 14 and int(whole.learner.updates) == 20
  assert trainer.traces["train_chunk"] == 1
  assert trainer.train_chunk._cache_size() == 1


def test_compiled_loop_equals_a_python_loop(trainer):
  looped = trainer.train_chunk(start(trainer), jnp.int32(3), TRAIN)
  state = start(trainer)
  begin, act, store, learn = map(
    jax.jit,
    (trainer.begin_episodes, trainer.act, trainer.step_and_store, trainer.learn),
  )
  for _ in range(3):
    state = begin(state)
    action, state = act(state, TRAIN.planning)
    state = store(state, action)
    for _ in range(2):
      state = learn(state, jnp.int32(1))
  assert_equal(looped, state, rtol=1e-4)


def test_burst_updates_without_stepping_in_the_same_program(trainer):
  before = jax.tree.map(np.asarray, start(trainer).replace(key=None, env=None))
  whole = trainer.train_chunk(start(trainer), ONE, Phase.burst(8))
  parts = start(trainer)
  for count in (5, 1, 2):
    parts = trainer.train_chunk(parts, ONE, Phase.burst(count))
  assert_equal(whole, parts)
  assert int(whole.learner.updates) == 8 and int(whole.metrics.updates) == 8
  for name in ("replay", "plan_mean", "vector_steps"):
    assert_equal(getattr(before, name), getattr(whole, name))
  assert trainer.traces["train_chunk"] == 1


def test_seed_phase_acts_uniformly_and_does_not_learn(trainer):
  first = trainer.init(jax.random.key(3))
  before = jax.tree.map(np.asarray, first.learner)
  state = trainer.train_chunk(first, jnp.int32(5), SEED)
  assert_equal(before, state.learner)
  assert bool(state.t0.all()), "an environment that never planned plans from zeros"
  actions = jax.vmap(
    lambda i: trainer.act(state.replace(vector_steps=i), SEED.planning)[0]
  )(jnp.arange(2000))
  flat = np.sort(np.asarray(actions).ravel())
  uniform = np.linspace(-1, 1, flat.size)
  # Kolmogorov-Smirnov distance; 1.95/sqrt(8000) has a probability of 0.1 %.
  assert np.abs(flat - uniform).max() / 2 < 1.95 / np.sqrt(flat.size)


def test_planning_starts_from_zeros_after_every_reset(trainer):
  state = trainer.train_chunk(start(trainer), jnp.int32(1), TRAIN)
  assert not bool(state.t0.any())
  state = trainer.train_chunk(state, jnp.int32(1), TRAIN)  # Step 6 ends episodes.
  assert bool(state.t0.all())
  later = state.replace(plan_mean=state.plan_mean + 0.5)
  action, _ = trainer.act(state, TRAIN.planning)
  other, _ = trainer.act(later, TRAIN.planning)
  np.testing.assert_array_equal(action, other)


def test_time_limit_keeps_the_true_last_observation(trainer):
  state = trainer.train_chunk(start(trainer), jnp.int32(9), TRAIN)
  rows = np.asarray(state.replay.rows)
  length = np.asarray(state.replay.length)
  full = [slot for slot in range(8) if length[slot] == 7]
  assert len(full) == 4  # 13 vector steps of 2 environments: 2 episodes each.
  for slot in full:
    np.testing.assert_array_equal(rows[slot, :, 1], np.arange(7))
    assert len(set(rows[slot, :, 0])) == 1, "a row of another episode"
    np.testing.assert_array_equal(rows[slot, :, 5], 0)  # Never a termination.
    np.testing.assert_allclose(rows[slot, 1:, 4], rows[slot, 1:, 2])
  draws = [rows[slot, 0, 0] for slot in range(8) if length[slot]]
  assert len(set(draws)) == len(draws), "two episodes share a draw"


def test_metrics_count_episodes_and_their_returns(trainer):
  state = trainer.train_chunk(start(trainer), jnp.int32(9), TRAIN)
  rows, length = np.asarray(state.replay.rows), np.asarray(state.replay.length)
  returns = [rows[s, 1:, 4].sum() for s in range(8) if length[s] == 7]
  assert int(state.metrics.episodes) == 4
  np.testing.assert_allclose(state.metrics.episode_return, sum(returns), rtol=1e-4)
  assert int(state.metrics.contact_overflow) == 13 * 2
  assert int(state.metrics.bad_env_resets) == 0


def test_broken_physics_ends_the_episode_before_the_bad_row():
  env = CountingEnv(break_above=0.5)
  trainer = Trainer(small_run(env), env)
  state = trainer.init(jax.random.key(5))
  state = trainer.train_chunk(state, jnp.int32(30), SEED)
  assert int(state.metrics.bad_env_resets) > 3
  assert np.isfinite(np.asarray(state.replay.rows)).all()
  assert np.isfinite(np.asarray(trainer.begin_episodes(state).env.obs)).all()
  rows, length = np.asarray(state.replay.rows), np.asarray(state.replay.length)
  for slot in range(8):
    np.testing.assert_array_equal(
      rows[slot, : length[slot], 1], np.arange(length[slot])
    )
    assert (rows[slot, : length[slot], 2] <= 0.5).all(), "a bad row was stored"


def test_no_copy_of_the_buffer():
  config = small_run(slots=200_000)
  trainer = Trainer(config, CountingEnv())
  state = jax.eval_shape(trainer.init, jax.random.key(0))
  buffer = state.replay.rows.size * 4
  total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state) if x.ndim)
  memory = trainer.train_chunk.lower(state, ONE, TRAIN).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 0.1 * buffer
  assert memory.alias_size_in_bytes >= total, "the state is not updated in place"


def test_evaluation_is_repeatable_and_leaves_training_alone(trainer):
  evaluator = Evaluator(trainer.config, trainer.batch_env.env)
  state = start(trainer)
  params = state.learner.params

  def evaluate(index, pieces):
    eval_state = evaluator.init(state.key, jnp.int32(index))
    for steps in pieces:
      eval_state = evaluator.run(params, eval_state, jnp.int32(steps))
    return evaluator.result(eval_state).episode_returns

  first = evaluate(0, [6])
  np.testing.assert_array_equal(first, evaluate(0, [1, 3, 2]))
  assert (first != evaluate(1, [6])).any(), "every evaluation has its own draws"
  assert evaluator.traces == {"init": 1, "run": 1}
  expected = trainer.train_chunk(start(trainer), jnp.int32(2), TRAIN)
  assert_equal(trainer.train_chunk(state, jnp.int32(2), TRAIN), expected)


def test_evaluation_counts_an_episode_that_breaks():
  env = CountingEnv(break_above=-2.0)  # Every action breaks it.
  evaluator = Evaluator(small_run(env), env)
  trainer = Trainer(small_run(env), env)
  state = trainer.init(jax.random.key(0))
  eval_state = evaluator.init(state.key, jnp.int32(0))
  eval_state = evaluator.run(state.learner.params, eval_state, jnp.int32(6))
  result = evaluator.result(eval_state)
  assert result.bad_episodes == 3
  np.testing.assert_array_equal(result.episode_returns, 0)


def test_staggered_environments_end_at_different_times():
  config = dataclasses.replace(small_run(), stagger=True)
  trainer = Trainer(config, CountingEnv())
  state = trainer.init(jax.random.key(0))
  ends = []
  for _ in range(14):
    episodes = int(state.metrics.episodes)
    state = trainer.train_chunk(state, jnp.int32(1), SEED)
    ends.append(int(state.metrics.episodes) - episodes)
  assert max(ends) == 1 and sum(ends) >= 4
