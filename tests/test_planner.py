"""The planner against a plain evaluation of the same candidates, and its contracts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjx_tdmpc2 import planner
from mjx_tdmpc2 import world_model as wm
from mjx_tdmpc2.config import AgentConfig

CFG = AgentConfig(
    obs_size=5,
    action_size=3,
    enc_dim=16,
    mlp_dim=16,
    latent_dim=16,
    num_q=4,
    num_bins=21,
    iterations=3,
    num_samples=32,
    num_pi_trajs=4,
    num_elites=8,
    dropout=0.2,
    q_dropout_form="head",
)
PAPER = dataclasses.replace(CFG, q_dropout_form="paper")
TASKS = dict(task_dim=4, action_dims=(1, 3, 2), discounts=(0.95, 0.99, 0.97))
VARIANTS = {
    "plain": CFG,
    "stacked": dataclasses.replace(CFG, q_layout="stacked", temperature=4.0),
    "dropout": PAPER,
    "episodic": dataclasses.replace(CFG, episodic=True),
    "multitask": dataclasses.replace(CFG, **TASKS),
    "uncertainty": dataclasses.replace(CFG, uncertainty_coef=0.1, num_pi_trajs=0),
}


@functools.cache
def _params(cfg):
  """Parameters away from the initial ones: no output is zero."""
  rng = np.random.default_rng(1)
  shapes = jax.eval_shape(lambda: wm.init_params(jax.random.key(0), cfg))
  params = jax.tree.map(
      lambda leaf: np.float32(0.3 * rng.standard_normal(leaf.shape)), shapes
  )
  return jax.tree.map(jnp.asarray, params)


@functools.cache
def _core(cfg, eval_mode=False):
  return jax.jit(
      lambda params, obs, mean, t0, draws, task: planner.plan_core(
          cfg, params, obs, mean, t0, draws, eval_mode, task
      )
  )


@functools.cache
def _plan(cfg, eval_mode=False):
  return jax.jit(
      lambda params, mean, obs, t0, key, task=None: planner.plan(
          cfg, params, mean, obs, t0, key, eval_mode, task
      )
  )


def _inputs(cfg):
  """(obs, prev_mean, draws) of one environment, without exploration noise."""
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)

  num_pi, iterations, horizon = cfg.num_pi_trajs, cfg.iterations, cfg.horizon
  draws = planner.PlanDraws(
      pi_eps=normal(horizon, num_pi, cfg.action_size),
      noise=normal(iterations, horizon, cfg.num_samples - num_pi, cfg.action_size),
      terminal_pi_eps=normal(iterations, cfg.num_samples, cfg.action_size),
      q_pair=jnp.array([[0, 3], [2, 1], [3, 2]] * 4, jnp.int32)[:iterations],
      u=jnp.float32(0.6),
      action_noise=jnp.zeros(cfg.action_size),
      dropout=jax.random.key(0) if cfg.q_dropout_form == "paper" else None,
  )
  return normal(cfg.obs_size), jnp.tanh(normal(horizon, cfg.action_size)), draws


def _batch(cfg, num_envs=5):
  """(prev_mean, obs, t0, key) of several environments; t0 alternates."""
  rng = np.random.default_rng(0)
  mean = np.tanh(rng.standard_normal((num_envs, cfg.horizon, cfg.action_size)))
  obs = rng.standard_normal((num_envs, cfg.obs_size))
  t0 = jnp.arange(num_envs) % 2 == 0
  return jnp.float32(mean), jnp.float32(obs), t0, jax.random.key(3)


@functools.partial(jax.jit, static_argnums=(0, 6))
def _plain_values(cfg, params, obs, actions, draws, task, i):
  """Values of given candidates, term by term (Eq. 6; 3.10, 3.11, 3.26)."""
  gamma = wm.discount(cfg, task)

  def penalty(z, a):
    q = wm.decode(cfg, wm.q_all(cfg, params["q"], params, z, a, task))
    return cfg.uncertainty_coef * q.mean(axis=0) * q.std(axis=0, ddof=1)

  z = wm.encode(cfg, params, jnp.tile(obs, (actions.shape[1], 1)), task)
  value, alive = 0.0, 1.0
  for t in range(cfg.horizon):
    reward = wm.decode(cfg, wm.reward_logits(cfg, params, z, actions[t], task))
    value += gamma**t * alive * (reward - penalty(z, actions[t]))
    z = wm.next_latent(cfg, params, z, actions[t], task)
    if cfg.episodic:
      alive = alive * (wm.termination_logit(cfg, params, z) <= 0)
  a = wm.pi(cfg, params, z, draws.terminal_pi_eps[i], task).action
  dropout = draws.dropout
  if dropout is not None:
    dropout = jax.random.split(dropout, cfg.iterations)[i]
  q = wm.decode(cfg, wm.q_all(cfg, params["q"], params, z, a, task, dropout))
  q = q[draws.q_pair[i]].mean(axis=0)
  return value + gamma**cfg.horizon * alive * (q - penalty(z, a))


def _plain_fit(cfg, values, actions):
  """(mean, std, elites, score) by NumPy (spec 3.15-3.17)."""
  index = np.argsort(-values, kind="stable")[: cfg.num_elites]
  score = np.exp(cfg.temperature * (values[index] - values[index].max()))
  score /= score.sum()
  elites = actions[:, index]
  mean = np.einsum("e,hea->ha", score, elites)
  variance = np.einsum("e,hea->ha", score, np.square(elites - mean[:, None]))
  std = np.clip(np.sqrt(variance), cfg.min_std, cfg.max_std)
  return mean, std, elites, score


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_fit_are_those_of_a_plain_evaluation(variant):
  cfg = VARIANTS[variant]
  params = _params(cfg)
  task = jnp.int32(2) if cfg.multitask else None
  obs, mean, draws = _inputs(cfg)
  action, mean, info = _core(cfg)(params, obs, mean, False, draws, task)
  actions = info.iter_actions_last
  params = wm.renorm_task_emb(params, task)
  last = cfg.iterations - 1
  plain = _plain_values(cfg, params, obs, actions, draws, task, last)
  values = np.asarray(info.iter_values[last])
  np.testing.assert_allclose(values, plain, atol=1e-4 * np.ptp(plain))
  if cfg.episodic:
    alive = dataclasses.replace(cfg, episodic=False)
    unmasked = _plain_values(alive, params, obs, actions, draws, task, last)
    assert np.any(np.abs(unmasked - plain) > 1e-3), "nothing was terminated"

  plain_mean, _, elites, score = _plain_fit(cfg, values, np.asarray(actions))
  valid = cfg.action_dims[2] if cfg.multitask else cfg.action_size
  np.testing.assert_allclose(mean[:, :valid], plain_mean[:, :valid], atol=1e-5)
  np.testing.assert_array_equal(mean[:, valid:], 0.0)
  np.testing.assert_array_equal(action[valid:], 0.0)
  np.testing.assert_array_equal(actions[..., valid:], 0.0)
  elite = int(np.searchsorted(np.cumsum(score), float(draws.u), side="right"))
  assert int(info.elite) == elite
  np.testing.assert_allclose(action, elites[0, elite], atol=1e-6)


def test_policy_trajectories_come_first_and_stay():
  params = _params(CFG)
  obs, mean, draws = _inputs(CFG)
  z = jnp.tile(wm.encode(CFG, params, obs), (CFG.num_pi_trajs, 1))
  _, _, info = _core(CFG)(params, obs, mean, False, draws, None)
  for t in range(CFG.horizon):
    action = wm.pi(CFG, params, z, draws.pi_eps[t]).action
    got = info.iter_actions_last[t, : CFG.num_pi_trajs]
    np.testing.assert_allclose(got, action, atol=1e-5)
    z = wm.next_latent(CFG, params, z, action)


def test_start_is_the_shifted_mean_and_the_full_std_unless_t0(monkeypatch):
  cfg = dataclasses.replace(CFG, iterations=1, max_std=1.5)
  obs, mean, draws = _inputs(cfg)
  mean = 0.4 * mean
  draws = draws._replace(noise=jnp.full_like(draws.noise, 0.25))
  monkeypatch.setattr(planner, "_value", lambda _, __, c, *___: c.value)
  start = np.concatenate([mean[1:], np.zeros((1, cfg.action_size))])
  run = _core(cfg)
  for t0, expected in ((False, start), (True, np.zeros_like(start))):
    _, _, info = run(_params(cfg), obs, mean, t0, draws, None)
    sampled = info.iter_actions_last[:, cfg.num_pi_trajs :]
    expected = np.broadcast_to(expected[:, None] + 0.25 * 1.5, sampled.shape)
    np.testing.assert_allclose(sampled, expected, atol=1e-6)


def test_candidates_are_clamped_before_they_are_valued():
  obs, mean, draws = _inputs(CFG)
  draws = draws._replace(noise=1e3 * draws.noise)
  _, mean, info = _core(CFG)(_params(CFG), obs, mean, True, draws, None)
  sampled = info.iter_actions_last[:, CFG.num_pi_trajs :]
  np.testing.assert_array_equal(jnp.abs(sampled), 1.0)
  # The mean is of clamped actions, the values too (the comparison above).
  assert np.all(np.abs(mean) <= 1.0)
  plain = _plain_values(
      CFG, _params(CFG), obs, info.iter_actions_last, draws, None, 2
  )
  np.testing.assert_allclose(
      info.iter_values[2], plain, atol=1e-4 * np.ptp(plain)
  )


def test_elites_are_of_the_current_iteration_only(monkeypatch):
  """Values that collapse in the last iteration still give its own best."""
  cfg = dataclasses.replace(CFG, iterations=2, num_elites=2)
  obs, mean, draws = _inputs(cfg)
  # Iteration 1 sees values near +100, iteration 2 near 0.
  draws = draws._replace(q_pair=jnp.array([[0, 1], [2, 3]], jnp.int32))
  good = {0: 100.0, 1: 100.0, 2: 0.0, 3: 0.0}

  def values(cfg, model, candidates, pi_eps, q_pair, dropout, task):
    bonus = jnp.array([good[i] for i in range(4)])[q_pair[0]]
    return bonus - jnp.sum(jnp.abs(candidates.actions), axis=(0, 2))

  monkeypatch.setattr(planner, "_value", values)
  _, mean, info = planner.plan_core(
      cfg, _params(cfg), obs, mean, jnp.array(True), draws, True
  )
  expected, *_ = _plain_fit(
      cfg, np.asarray(info.iter_values[1]), np.asarray(info.iter_actions_last)
  )
  assert info.iter_values[0].max() > 50 > info.iter_values[1].max()
  np.testing.assert_allclose(mean, expected, atol=1e-5)


def test_eval_mode_leaves_out_the_final_noise_only():
  obs, mean, draws = _inputs(CFG)
  draws = draws._replace(action_noise=jnp.array([0.05, -0.1, 0.02]))
  args = (_params(CFG), obs, mean, False, draws, None)
  action, mean, info = _core(CFG, eval_mode=True)(*args)
  noisy, noisy_mean, noisy_info = _core(CFG)(*args)
  np.testing.assert_allclose(mean, noisy_mean, atol=1e-6)
  assert int(info.elite) == int(noisy_info.elite)
  _, std, *_ = _plain_fit(
      CFG, np.asarray(info.iter_values[-1]), np.asarray(info.iter_actions_last)
  )
  # The std is biased, around the new mean, and clamped from below.
  expected = np.clip(action + std[0] * draws.action_noise, -1, 1)
  np.testing.assert_allclose(noisy, expected, atol=1e-5)
  assert not np.allclose(noisy, action, atol=1e-4)


def test_std_is_clamped_and_planning_needs_no_policy_trajectories():
  cfg = VARIANTS["uncertainty"]
  obs, mean, draws = _inputs(cfg)
  draws = draws._replace(
      noise=jnp.zeros_like(draws.noise), action_noise=jnp.ones(cfg.action_size)
  )
  action, mean, _ = _core(cfg)(_params(cfg), obs, mean, True, draws, None)
  np.testing.assert_array_equal(mean, 0.0)
  np.testing.assert_allclose(action, cfg.min_std, atol=1e-7)


def test_finds_the_optimum_of_a_known_value(monkeypatch):
  """V = -2·|a - a*|² has its only maximum at a*."""
  cfg = dataclasses.replace(
      CFG, iterations=8, num_samples=256, num_elites=32, max_std=1.0, min_std=0.01
  )
  obs, mean, draws = _inputs(cfg)
  target = 0.8 * mean

  def values(cfg, model, candidates, *_):
    return -2 * jnp.sum(
        jnp.square(candidates.actions - target[:, None]), axis=(0, 2)
    )

  monkeypatch.setattr(planner, "_value", values)
  action, mean, _ = planner.plan_core(
      cfg, _params(cfg), obs, jnp.zeros_like(mean), jnp.array(True), draws, True
  )
  np.testing.assert_allclose(mean, target, atol=0.03)
  np.testing.assert_allclose(action, target[0], atol=0.1)


def test_values_are_made_finite(monkeypatch):
  obs, mean, draws = _inputs(CFG)
  bad = jnp.array([jnp.nan, jnp.inf, -jnp.inf])

  def q_pair(cfg, heads, params, z, *_):
    return jnp.zeros(z.shape[0]).at[:3].set(bad)

  monkeypatch.setattr(wm, "q_pair", q_pair)
  _, mean, info = planner.plan_core(
      CFG, _params(CFG), obs, mean, jnp.array(True), draws, True
  )
  largest = np.finfo(np.float32).max
  expected = np.broadcast_to([0.0, largest, -largest], (CFG.iterations, 3))
  np.testing.assert_array_equal(info.iter_values[:, :3], expected)
  assert np.all(np.isfinite(mean))


def test_tied_values_take_the_first_candidates():
  """Reward and Q start at zero, so all candidates tie (spec 3.23)."""
  params = jax.jit(functools.partial(wm.init_params, cfg=CFG))(jax.random.key(0))
  obs, mean, draws = _inputs(CFG)
  _, mean, info = _core(CFG)(params, obs, mean, True, draws, None)
  assert np.ptp(info.iter_values) == 0.0
  first = info.iter_actions_last[:, : CFG.num_elites]
  np.testing.assert_allclose(mean, first.mean(axis=1), atol=1e-6)


def test_elite_is_drawn_in_proportion_to_the_score():
  score = jnp.array([0.5, 0.3, 0.2, 0.0])
  u = (jnp.arange(1000) + 0.5) / 1000
  drawn = jax.vmap(planner._draw_elite, (None, 0))(score, u)
  np.testing.assert_array_equal(np.bincount(drawn, minlength=4), [500, 300, 200, 0])
  # A uniform on an edge belongs to the elite that begins there.
  halves = jnp.array([0.5, 0.5])
  assert int(planner._draw_elite(halves, jnp.float32(0.5))) == 1
  assert int(planner._draw_elite(halves, jnp.float32(1.0))) == 1


def test_draws():
  cfg = dataclasses.replace(PAPER, iterations=4000)
  draws = jax.jit(functools.partial(planner.draw_plan, cfg))(jax.random.key(0))
  pairs = np.asarray(draws.q_pair)
  # Every ordered pair of distinct heads is equally likely, anew each iteration.
  assert np.all(pairs[:, 0] != pairs[:, 1])
  counts = np.bincount(pairs[:, 0] * cfg.num_q + pairs[:, 1], minlength=16)
  counts = counts[counts > 0]
  assert len(counts) == cfg.num_q * (cfg.num_q - 1)
  np.testing.assert_allclose(counts, 4000 / 12, rtol=0.25)
  for normal in (draws.noise, draws.terminal_pi_eps):
    assert abs(float(normal.mean())) < 0.01 and abs(float(normal.std()) - 1) < 0.01
  # Two heads leave one pair.
  cfg = dataclasses.replace(cfg, num_q=2)
  draws = jax.jit(functools.partial(planner.draw_plan, cfg))(jax.random.key(0))
  np.testing.assert_array_equal(np.sort(draws.q_pair), [[0, 1]] * 4000)


def test_dropout_belongs_to_the_paper_semantics():
  key = jax.random.key(0)
  assert planner.draw_plan(CFG, key).dropout is None
  without = dataclasses.replace(PAPER, dropout=0.0)
  assert planner.draw_plan(without, key).dropout is None
  obs, mean, draws = _inputs(PAPER)
  args = (_params(PAPER), obs, mean, True)
  _, _, info = _core(PAPER)(*args, draws, None)
  _, _, plain = _core(CFG)(*args, draws._replace(dropout=None), None)
  assert not np.allclose(info.iter_values[0], plain.iter_values[0], atol=1e-3)
  # Equal candidates with equal heads still differ: masks are drawn by candidate
  # and by iteration.
  same = draws._replace(
      noise=jnp.zeros_like(draws.noise),
      terminal_pi_eps=jnp.zeros_like(draws.terminal_pi_eps),
      q_pair=jnp.zeros_like(draws.q_pair).at[:, 1].set(1),
  )
  _, _, info = _core(PAPER)(*args, same, None)
  first = info.iter_values[0, PAPER.num_pi_trajs :]
  assert np.std(first) > 1e-3
  prior = info.iter_values[:, : PAPER.num_pi_trajs]
  assert np.all(np.std(prior, axis=0) > 1e-3)


@pytest.mark.parametrize(
    "variant, chunks", [("plain", (1, 2, 9)), ("dropout", (9,)), ("multitask", (9,))]
)
def test_chunks_and_loops_agree(variant, chunks):
  cfg = VARIANTS[variant]
  params = _params(cfg)
  mean, obs, t0, key = _batch(cfg)
  task = jnp.array([0, 1, 2, 1, 0]) if cfg.multitask else None
  draw = jax.jit(functools.partial(planner.draw_plan, cfg))
  expected = []
  for i in range(obs.shape[0]):
    draws = draw(jax.random.fold_in(key, i))
    one = None if task is None else task[i]
    out = _core(cfg)(params, obs[i], mean[i], t0[i], draws, one)
    expected.append(out[:2])
  actions, means = (np.stack(x) for x in zip(*expected, strict=True))
  for chunk in chunks:
    run = _plan(dataclasses.replace(cfg, plan_chunk=chunk))
    action, new_mean = run(params, mean, obs, t0, key, task)
    np.testing.assert_allclose(action, actions, atol=1e-4)
    np.testing.assert_allclose(new_mean, means, atol=1e-4)


def test_environments_have_their_own_draws():
  cfg = dataclasses.replace(CFG, plan_chunk=9)
  mean, obs, _, key = _batch(cfg)
  obs, t0 = jnp.tile(obs[:1], (5, 1)), jnp.ones(5, bool)
  action, _ = _plan(cfg)(_params(CFG), mean, obs, t0, key)
  assert len(np.unique(np.round(action[:, 0], 5))) == 5
  again, _ = _plan(cfg)(_params(CFG), mean, obs, t0, jax.random.fold_in(key, 1))
  assert not np.allclose(action, again, atol=1e-3)


def test_act_plans_by_default_and_compiles_once():
  cfg = dataclasses.replace(CFG, plan_chunk=1)
  traces = 0

  @jax.jit
  def act(params, mean, obs, t0, key):
    nonlocal traces
    traces += 1
    return planner.act(cfg, params, mean, obs, t0, key, eval_mode=False)

  mean, obs, t0, key = _batch(cfg)
  for i in range(3):
    args = (_params(CFG), mean, obs, t0, jax.random.fold_in(key, i))
    action, mean = act(*args)
    planned, planned_mean = _plan(cfg)(*args)
    np.testing.assert_allclose(action, planned, atol=1e-5)
    np.testing.assert_allclose(mean, planned_mean, atol=1e-5)
    t0 = jnp.zeros_like(t0)
  assert traces == 1


def test_long_embeddings_are_renormed_and_short_ones_not():
  cfg = VARIANTS["multitask"]
  mean, obs, t0, key = _batch(cfg)
  table = jnp.array([[2.0, 0, 0, 0], [0, 0.5, 0, 0], [0, 0, 3.0, 0]])
  unit = table.at[0, 0].set(1.0)
  task = jnp.array([0, 1, 0, 1, 1])
  run = _plan(dataclasses.replace(cfg, plan_chunk=9))
  results = [
      run({**_params(cfg), "task_emb": x}, mean, obs, t0, key, task)
      for x in (table, unit, table.at[1, 1].set(0.7))
  ]
  np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-4)
  assert not np.allclose(results[0][1][1], results[2][1][1], atol=1e-4)


def test_policy_prior_acts_without_planning():
  cfg = dataclasses.replace(VARIANTS["multitask"], mpc=False)
  params, (mean, obs, t0, key) = _params(VARIANTS["multitask"]), _batch(cfg, 3)
  task = jnp.arange(3)
  act = functools.partial(planner.act, cfg, params, mean, obs, t0, key, task=task)
  best, unchanged = act(eval_mode=True)
  renormed = wm.renorm_task_emb(params, task)
  z = wm.encode(cfg, renormed, obs, task)
  prior = wm.pi(cfg, renormed, z, jnp.zeros((3, cfg.action_size)), task)
  np.testing.assert_allclose(best, prior.mean, atol=1e-6)
  np.testing.assert_array_equal(unchanged, mean)
  sample, unchanged = act(eval_mode=False)
  np.testing.assert_array_equal(unchanged, mean)
  valid = np.arange(cfg.action_size) < np.array(cfg.action_dims)[:, None]
  np.testing.assert_array_equal((sample != best), valid)
  np.testing.assert_array_equal(sample[~valid], 0.0)
