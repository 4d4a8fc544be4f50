"""World model: sizes, initial values, tasks, policy prior and Q heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjx_tdmpc2 import world_model as wm
from mjx_tdmpc2.config import MODEL_SIZES, AgentConfig

SMALL = AgentConfig(
    obs_size=5, action_size=3, enc_dim=16, mlp_dim=24, latent_dim=16, num_q=4,
    dropout=0.2,
)  # fmt: skip
TASKS = dataclasses.replace(
    SMALL, task_dim=6, action_dims=(1, 3, 2), discounts=(0.9, 0.95, 0.99)
)


def _shapes(cfg):
  return jax.eval_shape(functools.partial(wm.init_params, cfg=cfg), jax.random.key(0))


def _count(tree):
  return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _perturbed(cfg, seed=0):
  """Parameters without zeroed layers, all heads different."""
  params = wm.init_params(jax.random.key(seed), cfg)
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
  noise = (jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True))
  leaves = [x + 0.3 * e for x, e in zip(leaves, noise, strict=True)]
  return jax.tree.unflatten(tree, leaves)


@pytest.fixture(scope="module")
def small():
  return _perturbed(SMALL)


@pytest.fixture(scope="module")
def tasks():
  return _perturbed(TASKS)


@pytest.fixture(scope="module")
def inputs():
  rng = np.random.default_rng(1)
  z = rng.normal(size=(2, 7, SMALL.latent_dim)).astype(np.float32)
  a = rng.uniform(-1, 1, size=(2, 7, SMALL.action_size)).astype(np.float32)
  return jnp.asarray(z), jnp.asarray(a)


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (
            dict(obs_size=24, action_size=6),
            dict(encoder=139520, dynamics=794112, reward=582245, pi=533516, q=2911225),
        ),
        (
            dict(obs_size=39, action_size=6, task_dim=96, action_dims=(6,) * 80),
            dict(
                encoder=167936, dynamics=843264, reward=631397, pi=582668, q=3156985,
                task_emb=7680,
            ),
        ),
    ],
)  # fmt: skip
def test_parameter_counts_of_the_paper(sizes, expected):
  params = _shapes(AgentConfig(**sizes))
  assert {name: _count(tree) for name, tree in params.items()} == expected


def test_total_parameter_count_of_dog():
  assert _count(_shapes(AgentConfig(obs_size=223, action_size=38))) == 5159082


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_layer_sizes_follow_the_model_size(size):
  enc, hidden, latent, num_enc, num_q = MODEL_SIZES[size]
  cfg = AgentConfig(
      obs_size=24, action_size=6, enc_dim=enc, mlp_dim=hidden, latent_dim=latent,
      num_enc_layers=num_enc, num_q=num_q,
  )  # fmt: skip
  params = _shapes(cfg)
  outs = [layer["kernel"].shape[1] for layer in params["encoder"]]
  assert outs == [enc] * (num_enc - 1) + [latent]
  assert len(params["q"]) == num_q
  assert params["q"][0][0]["kernel"].shape == (latent + 6, hidden)


def test_initial_values():
  params = jax.jit(functools.partial(wm.init_params, cfg=TASKS))(jax.random.key(3))
  zeroed = [params["reward"][-1], *(head[-1] for head in params["q"])]
  assert all((np.asarray(layer["kernel"]) == 0).all() for layer in zeroed)
  for name in ("encoder", "dynamics", "pi"):
    assert (np.asarray(params[name][-1]["kernel"]) != 0).all()
  first = [np.asarray(head[0]["kernel"]) for head in params["q"]]
  for i in range(len(first)):
    for j in range(i):
      assert abs(np.corrcoef(first[i].ravel(), first[j].ravel())[0, 1]) < 0.2
  emb = np.asarray(params["task_emb"])
  assert np.abs(emb).max() <= 0.02 and emb.std() > 0.005
  jax.tree.map(np.testing.assert_array_equal, wm.init_target(params), params["q"])


def test_episodic_adds_a_termination_head():
  params = _perturbed(dataclasses.replace(SMALL, episodic=True))
  z = jnp.ones((2, 7, SMALL.latent_dim))
  assert wm.termination_logit(SMALL, params, z).shape == (2, 7)
  assert "termination" not in _shapes(SMALL)


def test_latents_lie_on_simplices(small, inputs):
  z, a = inputs
  obs = jax.random.normal(jax.random.key(0), (2, 7, SMALL.obs_size))
  latents = [wm.encode(SMALL, small, obs), wm.next_latent(SMALL, small, z, a)]
  for latent in latents:
    assert latent.shape == (2, 7, SMALL.latent_dim)
    groups = np.asarray(latent).reshape(2, 7, -1, SMALL.simnorm_dim)
    np.testing.assert_allclose(groups.sum(-1), 1.0, rtol=1e-5)


def test_task_ids_broadcast_over_time(tasks, inputs):
  z, a = inputs
  task = jnp.array([0, 1, 2, 2, 1, 0, 1])
  whole = wm.reward_logits(TASKS, tasks, z, a, task)
  one = wm.reward_logits(TASKS, tasks, z[1, 3], a[1, 3], task[3])
  np.testing.assert_allclose(whole[1, 3], one, rtol=1e-4, atol=1e-5)
  other = wm.reward_logits(TASKS, tasks, z, a, (task + 1) % 3)
  assert np.abs(np.asarray(whole - other)).max(axis=-1).min() > 1e-3


def test_masks_and_discounts_by_task():
  task = jnp.array([2, 0, 1])
  expected = [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
  np.testing.assert_array_equal(wm.action_mask(TASKS, task), expected)
  np.testing.assert_allclose(wm.discount(TASKS, task), [0.99, 0.9, 0.95])
  assert wm.action_mask(SMALL, None) is None
  assert wm.discount(SMALL, None) == np.float32(0.99)


def test_renorm_touches_only_rows_that_are_looked_up_and_long(tasks):
  table = jnp.array([[3.0, 4.0], [0.3, 0.4], [6.0, 8.0]])
  params = {**tasks, "task_emb": table}
  out = wm.renorm_task_emb(params, jnp.array([0, 1, 0]))["task_emb"]
  np.testing.assert_allclose(out[0], [0.6, 0.8], rtol=1e-6)
  np.testing.assert_array_equal(out[1:], table[1:])
  assert wm.renorm_task_emb(params, None) is params


@pytest.mark.parametrize("form", ["paper", "head"])
def test_policy_sample_and_entropy_by_hand(tasks, inputs, form):
  cfg = dataclasses.replace(TASKS, entropy_form=form)
  z, task = inputs[0][0], jnp.array([0, 1, 2, 0, 1, 2, 0])
  eps = jax.random.normal(jax.random.key(4), (7, 3))
  out = jax.tree.map(np.asarray, wm.pi(cfg, tasks, z, eps, task))
  mask = np.asarray(wm.action_mask(cfg, task))
  assert (out.action[mask == 0] == 0).all() and (out.log_std[mask == 0] == 0).all()
  assert (out.action[mask == 1] != 0).all()
  assert (out.log_std > -10).all() and (out.log_std < 2).all()

  e, n = np.asarray(eps) * mask, mask.sum(-1)
  mu = np.arctanh(out.mean.astype(np.float64))
  np.testing.assert_allclose(
      out.action, np.tanh(mu + e * np.exp(out.log_std)), rtol=1e-3, atol=1e-5
  )
  terms = (-0.5 * e**2 - out.log_std).sum(-1)
  log_det = np.log(1 - out.action.astype(np.float64) ** 2 + 1e-6).sum(-1)
  half = 0.5 * np.log(2 * np.pi)
  # The constant counts invalid dims too in one form, and once in the other.
  np.testing.assert_allclose(out.entropy, log_det - terms + 3 * half, rtol=1e-3)
  expected = {
      "paper": log_det - n * (terms - half),
      "head": -n * (terms - 3 * half),
  }[form]
  np.testing.assert_allclose(out.scaled_entropy, expected, rtol=1e-3, atol=1e-3)


def test_entropy_gradients_of_the_two_forms(small, inputs):
  """The Jacobian of tanh has a gradient in one form only (spec 2.12)."""
  z = inputs[0][0]
  eps = jax.random.normal(jax.random.key(4), (7, 3))

  def bias_grad(form):
    cfg = dataclasses.replace(SMALL, entropy_form=form)

    def total(bias):
      last = {**small["pi"][-1], "bias": bias}
      params = {**small, "pi": (*small["pi"][:-1], last)}
      return wm.pi(cfg, params, z, eps).scaled_entropy.sum()

    return np.asarray(jax.grad(total)(small["pi"][-1]["bias"]))

  assert (bias_grad("head")[:3] == 0).all()  # The mean gets no entropy gradient.
  assert np.abs(bias_grad("paper")[:3]).min() > 1e-3
  assert np.abs(bias_grad("head")[3:]).min() > 1e-3


@pytest.mark.parametrize("layout", ["list", "stacked"])
@pytest.mark.parametrize("dropout", [False, True])
def test_pair_equals_selection_from_all_heads(small, inputs, layout, dropout):
  cfg = dataclasses.replace(SMALL, q_layout=layout)
  key = jax.random.key(5) if dropout else None
  heads = small["q"]
  logits = wm.q_all(SMALL, heads, small, *inputs, dropout_key=key)
  assert logits.shape == (4, 2, 7, SMALL.num_bins)
  np.testing.assert_allclose(
      wm.q_all(cfg, heads, small, *inputs, dropout_key=key), logits, atol=1e-4
  )
  values = wm.decode(SMALL, logits)
  pair_fn = jax.jit(
      lambda pair, reduce: wm.q_pair(
          cfg, heads, small, *inputs, pair, reduce, dropout_key=key
      ),
      static_argnums=1,
  )
  for i, j in [(0, 3), (2, 1)]:
    both = np.stack([values[i], values[j]])
    pair = jnp.array([i, j])
    tolerance = dict(rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(pair_fn(pair, "min"), both.min(0), **tolerance)
    np.testing.assert_allclose(pair_fn(pair, "avg"), both.mean(0), **tolerance)


def test_stacked_heads_can_be_passed_instead_of_the_list(small, inputs):
  stacked = wm.stack_heads(small["q"])
  np.testing.assert_allclose(
      wm.q_all(SMALL, stacked, small, *inputs),
      wm.q_all(SMALL, small["q"], small, *inputs),
      atol=1e-4,
  )


@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_action_gradient_of_the_pair(tasks, inputs, layout):
  cfg = dataclasses.replace(TASKS, q_layout=layout)
  (z, a), pair, key = inputs, jnp.array([3, 1]), jax.random.key(6)
  task = jnp.array([0, 1, 2, 0, 1, 2, 0])

  def average(a):
    return wm.q_pair(cfg, tasks["q"], tasks, z, a, pair, "avg", task, key).sum()

  value, slope = jax.jit(
      lambda a: wm.q_avg_and_action_grad(cfg, tasks["q"], tasks, z, a, pair, task, key)
  )(a)
  total, expected = jax.jit(jax.value_and_grad(average))(a)
  np.testing.assert_allclose(value.sum(), total, rtol=1e-3, atol=1e-3)
  scale = np.abs(np.asarray(expected)).max()
  np.testing.assert_allclose(slope, expected, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_dropout_is_independent_by_head_and_by_call(small, inputs, layout):
  cfg = dataclasses.replace(SMALL, q_layout=layout)
  same = (small["q"][0],) * 4

  def call(key):
    return np.asarray(wm.q_all(cfg, same, small, *inputs, dropout_key=key))

  plain, first, second = (call(k) for k in (None, *jax.random.split(jax.random.key(0))))
  for i in range(1, 4):
    np.testing.assert_allclose(plain[i], plain[0], atol=1e-4)
    assert np.abs(first[i] - first[0]).max() > 1e-2
  assert np.abs(first - second).max(axis=(1, 2, 3)).min() > 1e-2
  none = dataclasses.replace(cfg, dropout=0.0)
  out = wm.q_all(none, same, small, *inputs, dropout_key=jax.random.key(0))
  np.testing.assert_allclose(out, plain, atol=1e-4)


def test_drawn_pairs_are_distinct_and_uniform():
  pairs = np.asarray(wm.draw_pairs(jax.random.key(0), 4, 20_000))
  counts = np.zeros((4, 4))
  np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
  assert (np.diag(counts) == 0).all()
  off = counts[~np.eye(4, dtype=bool)]
  assert np.abs(off - 20_000 / 12).max() < 5 * np.sqrt(20_000 / 12)
  two = np.asarray(wm.draw_pairs(jax.random.key(1), 2, 50))
  assert (two.sum(-1) == 1).all()
