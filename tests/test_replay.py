"""The episode ring buffer, with rows that carry their own identity.

Every observation is (environment, episode, step, 0) and every action, reward and
flag is a function of the same three numbers, so that a window which is misaligned,
stale or crosses an episode shows at once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjx_tdmpc2 import replay

N, T, H, S, A = 3, 9, 3, 4, 2
SLOTS = 2 * N + 2


def coded_obs(env, episode, step):
  return np.stack([env, episode, step, np.zeros_like(env)], -1).astype(np.float32)


def coded_action(env, episode, step):
  return np.stack([100 * episode + step, env], -1).astype(np.float32)


class Oracle:
  """Plain NumPy model: a list of episodes in the order in which they began."""

  def __init__(self, num_envs, slots):
    self.slots = slots
    self.episodes = {}  # slot -> list of rows
    self.published = set()
    self.slot = list(range(num_envs))
    self.cursor = num_envs
    for env in range(num_envs):
      self.episodes[env] = [(env, 0, 0)]
    self.count = [0] * num_envs

  def add(self, done, bad):
    running = set(self.slot)
    self.published |= set(self.episodes) - running
    for env in range(len(self.slot)):
      rows = self.episodes[self.slot[env]]
      if not bad[env]:
        rows.append((env, self.count[env], len(rows)))
    for env in range(len(self.slot)):
      if done[env] or bad[env]:
        while self.cursor in running:
          self.cursor = (self.cursor + 1) % self.slots
        self.count[env] += 1
        self.slot[env] = self.cursor
        self.episodes[self.cursor] = [(env, self.count[env], 0)]
        self.published.discard(self.cursor)
        self.cursor = (self.cursor + 1) % self.slots

  def windows(self, insertion):
    return {
      (slot, start)
      for slot, rows in self.episodes.items()
      for start in range(len(rows) - H)
      if insertion == "step" or slot in self.published
    }


class Driver:
  """Feeds coded transitions to the buffer and to the oracle alike."""

  def __init__(self, num_envs=N, slots=SLOTS):
    self.env = np.arange(num_envs)
    self.episode = np.zeros(num_envs, int)
    self.step = np.zeros(num_envs, int)
    self.terminations = set()
    self.oracle = Oracle(num_envs, slots)
    first = coded_obs(self.env, self.episode, self.step)
    state = replay.init(num_envs, slots, T, S, A)
    self.state = jitted_begin(state, jnp.asarray(first), jnp.ones(num_envs, bool))

  def add(self, done, bad=None):
    bad = np.zeros_like(done) if bad is None else bad
    step = self.step + 1
    obs = coded_obs(self.env, self.episode, step)
    obs[bad] = np.nan
    terminated = done & (self.env % 2 == 0)
    self.terminations |= {
      (env, self.episode[env], step[env]) for env in self.env[terminated & ~bad]
    }
    transition = replay.Transition(
      last_obs=jnp.asarray(obs),
      action=jnp.asarray(coded_action(self.env, self.episode, step)),
      reward=jnp.asarray(1000.0 * self.episode + step, jnp.float32),
      terminated=jnp.asarray(terminated),
      done=jnp.asarray(done),
      bad=jnp.asarray(bad),
    )
    ended = done | bad
    self.episode = self.episode + ended
    self.step = np.where(ended, 0, step)
    reset_obs = jnp.asarray(coded_obs(self.env, self.episode, np.zeros_like(step)))
    self.state = jitted_begin(
      jitted_add(self.state, transition), reset_obs, jnp.asarray(ended)
    )
    self.oracle.add(done, bad)


# The old state is kept by some tests, so these do not donate.
jitted_begin = jax.jit(replay.begin)
jitted_add = jax.jit(replay.add)
jitted_table = jax.jit(replay.window_table, static_argnums=(1, 2))
jitted_draw = jax.jit(replay.draw_windows, static_argnums=2)
jitted_gather = jax.jit(replay.gather, static_argnums=(3, 4, 5))


def check_against_oracle(driver):
  state, oracle = driver.state, driver.oracle
  assert np.array_equal(state.slot, oracle.slot)
  rows = np.asarray(state.rows)
  length = np.asarray(state.length)
  for slot in range(oracle.slots):
    expected = oracle.episodes.get(slot, [])
    assert length[slot] == len(expected)
    for row, code in enumerate(expected):
      env, episode, step = (np.asarray(x) for x in code)
      assert step == row
      assert np.array_equal(rows[slot, row, :S], coded_obs(env, episode, step))
      if row == 0:
        assert not rows[slot, 0, S:].any()
      else:
        assert np.array_equal(
          rows[slot, row, S : S + A], coded_action(env, episode, step)
        )
        assert rows[slot, row, S + A] == 1000 * episode + step
  held = [len(rows) for rows in oracle.episodes.values()]
  closed = set(oracle.episodes) - set(oracle.slot)
  assert int(replay.num_transitions(state)) == sum(held) - len(held)
  assert int(replay.num_episodes(state)) == len(closed)
  for insertion in ("step", "episode"):
    table = jitted_table(state, H, insertion)
    assert int(replay.num_windows(table)) == len(oracle.windows(insertion))


def check_draws(driver, insertion, seed=0):
  """Every legal window is drawn, no other, and its rows belong together."""
  legal = driver.oracle.windows(insertion)
  if not legal:
    return
  table = jitted_table(driver.state, H, insertion)
  slot, start = jitted_draw(jax.random.key(seed), table, (2048,))
  drawn = set(zip(np.asarray(slot).tolist(), np.asarray(start).tolist(), strict=True))
  assert drawn == legal
  batch = jitted_gather(driver.state, slot, start, H, S, A)
  obs, step = np.asarray(batch.obs), np.asarray(batch.obs[..., 2])
  assert (obs[..., 0] == obs[0, :, 0]).all()
  assert (obs[..., 1] == obs[0, :, 1]).all()
  assert (np.diff(step, axis=0) == 1).all()
  assert np.array_equal(step[0], start)
  env, episode = obs[0, :, 0], obs[0, :, 1]
  assert np.array_equal(
    batch.action, np.stack([coded_action(env, episode, t) for t in step[1:]])
  )
  assert np.array_equal(batch.reward, 1000 * episode + step[1:])
  terminated = [
    [code in driver.terminations for code in zip(env, episode, row, strict=True)]
    for row in step[1:]
  ]
  assert np.array_equal(batch.terminated, terminated)


def lockstep(rng, driver):
  del rng
  return driver.step + 1 == T, np.zeros(N, bool)


def staggered(rng, driver):
  del rng
  return driver.step + 1 == T - driver.env % T, np.zeros(N, bool)


def random_ends(rng, driver):
  return (rng.random(N) < 0.12) | (driver.step + 1 == T), rng.random(N) < 0.06


@pytest.mark.parametrize("ends", [lockstep, staggered, random_ends])
def test_three_wraps_match_the_oracle(ends):
  rng = np.random.default_rng(1)
  driver = Driver()
  episodes = 0
  while episodes < 3 * SLOTS + N:
    done, bad = ends(rng, driver)
    driver.add(done, bad)
    episodes += int((done | bad).sum())
    check_against_oracle(driver)
    if rng.random() < 0.15:
      check_draws(driver, "step")
      check_draws(driver, "episode")
  check_draws(driver, "step")
  check_draws(driver, "episode")
  assert len(driver.oracle.windows("episode")) > 0


def test_draws_are_uniform_over_all_windows():
  rng = np.random.default_rng(2)
  driver = Driver(slots=20)
  for _ in range(60):
    driver.add((rng.random(N) < 0.05) | (driver.step + 1 == T))
  for insertion in ("step", "episode"):
    table = jitted_table(driver.state, H, insertion)
    total = int(table[-1])
    assert total > 15
    draws = 400 * total
    slot, start = replay.draw_windows(jax.random.key(3), table, (draws,))
    ticket = np.concatenate([[0], np.asarray(table)])[np.asarray(slot)] + start
    counts = np.bincount(ticket, minlength=total)
    chi2 = ((counts - 400) ** 2 / 400).sum()
    # Mean total-1, standard deviation sqrt(2(total-1)): four of them above.
    assert chi2 < total - 1 + 4 * np.sqrt(2 * (total - 1))


def test_insertion_step_draws_from_running_episodes_at_once():
  driver = Driver()
  for step in range(1, T):
    driver.add(np.zeros(N, bool))
    table = jitted_table(driver.state, H, "step")
    assert int(replay.num_windows(table)) == N * max(0, step + 1 - H)
    assert int(replay.num_windows(jitted_table(driver.state, H, "episode"))) == 0


def test_insertion_episode_publishes_one_step_after_the_end():
  driver = Driver()

  def count():
    return int(replay.num_windows(jitted_table(driver.state, H, "episode")))

  for _ in range(T - 1):
    driver.add(np.zeros(N, bool))
  driver.add(np.ones(N, bool))
  assert int(replay.num_episodes(driver.state)) == N
  assert count() == 0
  driver.add(np.zeros(N, bool))
  assert count() == N * (T + 1 - H)


def test_last_row_before_a_reset_is_the_true_last_observation():
  driver = Driver()
  for step in range(1, T + 1):
    driver.add(np.full(N, step == T))
  last = np.asarray(driver.state.rows)[:N, T]
  expected = coded_obs(np.arange(N), np.zeros(N), np.full(N, T))
  assert np.array_equal(last[:, :S], expected)
  # Environments 0 and 2 terminated, environment 1 met its time limit.
  assert np.array_equal(last[:, S + A + 1], [1, 0, 1])


def test_sizes_when_empty_full_and_one_more():
  driver = Driver()
  assert int(replay.num_transitions(driver.state)) == 0
  assert int(replay.num_episodes(driver.state)) == 0
  # Fill every slot but the N running ones, one environment at a time.
  only = np.eye(N, dtype=bool)
  taken = N
  while taken < SLOTS:
    driver.add(np.full(N, False))
    driver.add(only[taken % N])
    taken += 1
  assert (np.asarray(driver.state.length) > 0).all()
  assert int(replay.num_episodes(driver.state)) == SLOTS - N
  before = int(replay.num_transitions(driver.state))
  # One more episode takes the oldest slot that is not running.
  oldest = int(driver.state.cursor)
  while oldest in np.asarray(driver.state.slot):
    oldest = (oldest + 1) % SLOTS
  lost = int(driver.state.length[oldest]) - 1
  driver.add(only[0])
  assert int(driver.state.slot[0]) == oldest
  assert int(replay.num_episodes(driver.state)) == SLOTS - N
  assert int(replay.num_transitions(driver.state)) == before + N - lost
  check_against_oracle(driver)


def test_bad_rows_never_reach_the_buffer():
  driver = Driver()
  for _ in range(4):
    driver.add(np.zeros(N, bool))
  driver.add(np.zeros(N, bool), np.array([True, False, False]))
  assert np.isfinite(np.asarray(driver.state.rows)).all()
  assert np.asarray(driver.state.length)[:N].tolist() == [5, 6, 6]
  assert int(driver.state.slot[0]) == N and int(driver.state.row[0]) == 0


def test_rows_beyond_the_episode_length_are_dropped():
  driver = Driver()
  for _ in range(T + 2):
    driver.add(np.zeros(N, bool))
  assert np.asarray(driver.state.length)[:N].tolist() == [T + 1] * N
  assert np.asarray(driver.state.rows)[0, T, 2] == T


def test_draw_without_legal_windows_stays_in_range():
  driver = Driver()
  slot, start = jitted_draw(
    jax.random.key(0), jitted_table(driver.state, H, "step"), (16,)
  )
  assert ((slot >= 0) & (slot < SLOTS)).all() and (start == 0).all()


def test_too_few_slots_and_unknown_insertion_are_refused():
  with pytest.raises(ValueError, match="at least 6"):
    replay.init(3, 5, T, S, A)
  with pytest.raises(ValueError, match='"step" or "episode"'):
    replay.window_table(Driver().state, H, "rows")


class Big(NamedTuple):
  """Sizes at which the buffer is far larger than anything that a step needs."""

  num_envs: int = 4
  slots: int = 200
  length: int = 100
  obs_size: int = 20
  action_size: int = 6


def test_writing_and_reading_copy_no_buffer():
  big = Big()
  obs = jnp.zeros((big.num_envs, big.obs_size))
  traces = []

  @functools.partial(jax.jit, donate_argnums=0)
  def run(state, key):
    traces.append(None)

    def body(carry, key):
      state, total = carry
      keys = jax.random.split(key, 3)
      done = jax.random.uniform(keys[0], (big.num_envs,)) < 0.1
      state = replay.add(
        state,
        replay.Transition(
          last_obs=obs + total,
          action=jnp.zeros((big.num_envs, big.action_size)),
          reward=jax.random.uniform(keys[1], (big.num_envs,)),
          terminated=done,
          done=done,
          bad=~done & (total < -1),
        ),
      )
      state = replay.begin(state, obs, done)
      table = replay.window_table(state, H, "step")
      slot, start = replay.draw_windows(keys[2], table, (2, 16))

      def update(total, indices):
        batch = replay.gather(
          state, *indices, H, big.obs_size, big.action_size
        )
        return total + batch.reward.sum() + batch.obs.sum(), None

      total, _ = jax.lax.scan(update, total, (slot, start))
      return (state, total), None

    (state, total), _ = jax.lax.scan(
      body, (state, jnp.zeros(())), jax.random.split(key, 8)
    )
    return state, total

  state = replay.init(*big)
  buffer_bytes = state.rows.nbytes
  state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  memory = run.lower(state, jax.random.key(0)).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 0.1 * buffer_bytes
  assert memory.alias_size_in_bytes >= state_bytes

  traces.clear()
  jax.clear_caches()
  for seed in range(3):
    state, _ = run(state, jax.random.key(seed))
  assert len(traces) == 1
  assert int(replay.num_transitions(state)) == 3 * 8 * big.num_envs
