"""The update: order, freshness, gradient routes, clipping, dropout, averages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjx_tdmpc2 import losses
from mjx_tdmpc2 import update as update_lib
from mjx_tdmpc2 import world_model as wm
from mjx_tdmpc2.config import AgentConfig
from mjx_tdmpc2.types import Batch

H, B, A, S = 3, 6, 3, 5
SINGLE = AgentConfig(
    obs_size=S, action_size=A, enc_dim=16, mlp_dim=16, latent_dim=16, num_q=3,
    dropout=0.2, lr=1e-2,
)  # fmt: skip
MULTI = dataclasses.replace(
    SINGLE, task_dim=4, action_dims=(1, 3, 2, 2), discounts=(0.5, 0.9, 0.95, 0.99)
)
TASK = (0, 2, 0, 2, 0, 2)  # Tasks 1 and 3 are absent.


def make_batch(cfg, seed=0):
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  return Batch(
      obs=draw(H + 1, B, S),
      action=jnp.tanh(draw(H, B, A)),
      reward=draw(H, B),
      terminated=jnp.zeros((H, B)),
      task=jnp.array(TASK) if cfg.multitask else None,
  )


# Compiling takes most of the time of these tests; they need no fast code.
jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@functools.partial(jit, static_argnums=0)
def make_learner(cfg):
  """A learner without zeroed layers whose targets differ from the online heads."""
  learner = update_lib.init_learner(cfg, jax.random.key(0))

  def perturb(tree, key):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noise = (jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True))
    leaves = [x + 0.2 * e for x, e in zip(leaves, noise, strict=True)]
    return jax.tree.unflatten(structure, leaves)

  params = perturb(learner.params, jax.random.key(1))
  if cfg.multitask:
    table = jnp.full((4, 4), 2.0) * jnp.arange(1.0, 5.0)[:, None]
    params = {**params, "task_emb": table}
  target_q = perturb(learner.target_q, jax.random.key(2))
  return learner.replace(params=params, target_q=target_q)


update = jit(update_lib.update, static_argnums=0)
draw = jit(update_lib.draw_update, static_argnums=(0, 2))


@functools.partial(jit, static_argnums=0)
def pieces(cfg, before, after_params, batch, draws):
  """The parts of an update, each computed on its own from public functions.

  `after_params` are the parameters after the world-model step.
  """
  params = wm.renorm_task_emb(before.params, batch.task)
  next_z = wm.encode(cfg, params, batch.obs[1:], batch.task)
  target = losses.td_target(
      cfg, params, before.target_q, next_z, batch,
      draws.td_pi_eps, draws.td_pair, draws.td_dropout,
  )  # fmt: skip
  trained = {k: v for k, v in params.items() if k != "pi"}
  grad_fn = jax.value_and_grad(losses.model_loss, argnums=(1, 3, 4), has_aux=True)
  (_, (zs, info)), (grads, _, _) = grad_fn(
      cfg, trained, batch, next_z, target, draws.value_dropout
  )
  policy = functools.partial(
      losses.policy_loss, cfg, task=batch.task, scale=before.scale,
      eps=draws.policy_pi_eps, pair=draws.policy_pair,
      dropout_key=draws.policy_dropout,
  )  # fmt: skip

  def run(q_params, zs):
    return policy(params["pi"], q_params, zs)[0]

  fresh_zs = losses.model_loss(
      cfg, after_params, batch, next_z, target, draws.value_dropout
  )[1][0]
  norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
  return {
      "next_z": next_z,
      "target": target,
      "info": info,
      "grad_norm": norm,
      "pi_loss": run(after_params, zs),
      "pi_loss_old_q": run({**params}, zs),
      "pi_loss_new_zs": run(after_params, fresh_zs),
  }


@pytest.fixture(scope="module")
def multi():
  """(before, batch, draws, after, info, pieces) of one multi-task update."""
  before, batch = make_learner(MULTI), make_batch(MULTI)
  draws = draw(MULTI, jax.random.key(3), B)
  after, info = update(MULTI, before, batch, draws)
  return before, batch, draws, after, info, pieces(
      MULTI, before, after.params, batch, draws
  )


def assert_trees(got, expected, **tolerance):
  jax.tree.map(
      lambda g, e: np.testing.assert_allclose(g, e, **tolerance), got, expected
  )


def test_update_is_the_sum_of_its_parts(multi):
  *_, info, parts = multi
  for name, value in parts["info"].items():
    np.testing.assert_allclose(info[name], value, rtol=1e-4, err_msg=name)


def test_world_model_norm_covers_world_model_gradients_only(multi):
  _, batch, draws, after, info, parts = multi
  np.testing.assert_allclose(info["grad_norm"], parts["grad_norm"], rtol=1e-4)
  # Nor do policy gradients of the update before enter the next one.
  _, info = update(MULTI, after, batch, draws)
  parts = pieces(MULTI, after, after.params, batch, draws)
  np.testing.assert_allclose(info["grad_norm"], parts["grad_norm"], rtol=1e-4)


def test_policy_loss_has_new_heads_and_old_latents(multi):
  *_, info, parts = multi
  np.testing.assert_allclose(info["pi_loss"], parts["pi_loss"], rtol=1e-4)
  for other in ("pi_loss_old_q", "pi_loss_new_zs"):
    assert abs(parts[other] / parts["pi_loss"] - 1) > 1e-3


def test_targets_average_the_heads_after_the_step(multi):
  before, _, _, after, *_ = multi
  expected = jax.tree.map(
      lambda old, new: 0.99 * old + 0.01 * new, before.target_q, after.params["q"]
  )
  assert_trees(after.target_q, expected, rtol=1e-5, atol=1e-7)
  stale = jax.tree.map(
      lambda old, new: 0.99 * old + 0.01 * new, before.target_q, before.params["q"]
  )
  gap = np.abs(after.target_q[0][0]["kernel"] - stale[0][0]["kernel"]).max()
  assert gap > 5e-5  # lr·tau = 1e-4: the two can be told apart.


def test_renorm_at_both_look_ups_and_of_looked_up_rows_only(multi):
  before, batch, draws, after, info, _ = multi
  old, new = before.params["task_emb"], after.params["task_emb"]
  np.testing.assert_array_equal(new[1], old[1])
  np.testing.assert_array_equal(new[3], old[3])
  # Adam's first step lengthens a row of norm 1 or shortens it (by about lr); the
  # second look-up brings the one that was lengthened back to the sphere.
  lengths = np.linalg.norm(new[np.array([0, 2])], axis=-1)
  assert (lengths <= 1 + 1e-5).all()
  assert np.isclose(lengths, 1.0, atol=1e-5).any()
  # The first look-up: long rows and rows already renormed give the same losses.
  params = wm.renorm_task_emb(before.params, batch.task)
  _, same = update(MULTI, before.replace(params=params), batch, draws)
  assert_trees(info, same, rtol=1e-5)


def test_gradient_routes(multi):
  before, batch, draws, after, *_ = multi
  parts = jit(
      lambda pi, params, zs: jax.grad(
          lambda *args: losses.policy_loss(
              MULTI, *args, before.scale, batch.task,
              draws.policy_pi_eps, draws.policy_pair, draws.policy_dropout,
          )[0],
          argnums=(0, 1, 2),
      )(pi, params, zs)
  )  # fmt: skip
  zs = jax.random.normal(jax.random.key(0), (H + 1, B, 16))
  to_pi, to_params, to_zs = parts(after.params["pi"], after.params, zs)
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(to_pi))
  # Neither heads, nor task embedding, nor latents.
  assert all((g == 0).all() for g in jax.tree.leaves((to_params, to_zs)))

  to_model = jit(
      jax.grad(
          lambda params, next_z: losses.td_target(
              MULTI, params, before.target_q, next_z, batch,
              draws.td_pi_eps, draws.td_pair, draws.td_dropout,
          ).sum(),
          argnums=(0, 1),
      )
  )(before.params, zs[1:])  # fmt: skip
  assert all((g == 0).all() for g in jax.tree.leaves(to_model))


def test_discount_by_task_and_termination_in_the_target(multi):
  before, batch, draws, *_, parts = multi
  target_fn = jit(
      lambda batch: losses.td_target(
          MULTI, before.params, before.target_q, parts["next_z"], batch,
          draws.td_pi_eps, draws.td_pair, None,
      )
  )  # fmt: skip
  before = before.replace(params=wm.renorm_task_emb(before.params, batch.task))
  batch = batch._replace(reward=jnp.zeros((H, B)))
  value = target_fn(batch)
  ended = batch._replace(terminated=batch.terminated.at[-1].set(1.0))
  got = target_fn(ended)
  assert (got[-1] == 0).all()
  np.testing.assert_array_equal(got[:-1], value[:-1])
  gamma = np.array([0.5, 0.9, 0.95, 0.99], np.float32)
  action = wm.pi(MULTI, before.params, parts["next_z"], draws.td_pi_eps, batch.task)
  bootstrap = wm.q_pair(
      MULTI, before.target_q, before.params, parts["next_z"], action.action,
      draws.td_pair, "min", batch.task,
  )  # fmt: skip
  np.testing.assert_allclose(
      value, gamma[np.array(TASK)] * bootstrap, rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize("form", ["paper", "head"])
def test_dropout_is_drawn_where_the_semantics_say(form):
  cfg = dataclasses.replace(SINGLE, q_dropout_form=form)
  draws = update_lib.draw_update(cfg, jax.random.key(0), B)
  assert (draws.td_dropout is not None) == (form == "paper")
  assert draws.value_dropout is not None and draws.policy_dropout is not None
  keys = [k for k in draws[4:] if k is not None]
  assert len({tuple(jax.random.key_data(k).tolist()) for k in keys}) == len(keys)
  none = dataclasses.replace(cfg, dropout=0.0)
  assert update_lib.draw_update(none, jax.random.key(0), B)[4:] == (None, None, None)


def test_each_dropout_key_reaches_its_own_pass(multi):
  before, batch, draws, _, info, _ = multi
  changed = {
      name: update(
          MULTI, before, batch, draws._replace(**{name: jax.random.key(99)})
      )[1]
      for name in ("td_dropout", "value_dropout", "policy_dropout")
  }

  def differs(name, term):
    return bool(changed[name][term] != info[term])

  assert differs("td_dropout", "value_loss")
  assert differs("value_dropout", "value_loss")
  assert differs("policy_dropout", "pi_loss")
  assert not differs("policy_dropout", "value_loss")
  for name in changed:  # No other network has dropout.
    assert not differs(name, "consistency_loss")
    assert not differs(name, "reward_loss")


def test_learning_rates_and_adam(multi):
  """The first Adam step moves every entry by its learning rate (or less)."""
  before, _, _, after, *_ = multi
  moved = jax.tree.map(
      lambda new, old: np.abs(new - old).max(), after.params, before.params
  )
  for name, lr in [("encoder", 0.3e-2), ("dynamics", 1e-2), ("reward", 1e-2),
                   ("q", 1e-2), ("pi", 1e-2)]:  # fmt: skip
    largest = max(jax.tree.leaves(moved[name]))
    assert largest == pytest.approx(lr, rel=1e-2), name


def test_clip_rule():
  grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
  clipped, norm = update_lib.clip_by_norm(grads, 1.0)
  assert norm == 5.0
  np.testing.assert_allclose(clipped["b"], 4.0 / (5.0 + 1e-6), rtol=1e-6)
  kept, _ = update_lib.clip_by_norm(grads, 20.0)
  assert_trees(kept, grads, rtol=0)


def test_termination_terms_appear_with_episodic_only(multi):
  *_, info, _ = multi
  assert not any(name.startswith("termination") for name in info)
  cfg = dataclasses.replace(SINGLE, episodic=True, termination_coef=2.0)
  batch = make_batch(cfg)
  batch = batch._replace(terminated=batch.terminated.at[-1, :3].set(1.0))
  next_z, target = jnp.zeros((H, B, cfg.latent_dim)), jnp.zeros((H, B))
  loss_fn = jit(functools.partial(losses.model_loss, cfg))
  params = make_learner(cfg).params
  _, (zs, info) = loss_fn(params, batch, next_z, target, None)
  # Predicted latents only, all steps alike.
  prob = jax.nn.sigmoid(wm.termination_logit(cfg, params, zs[1:]))
  likelihood = jnp.where(batch.terminated > 0, prob, 1 - prob)
  np.testing.assert_allclose(
      info["termination_loss"], -jnp.log(likelihood).mean(), rtol=1e-4
  )
  assert info["termination_rate"] == 0.5
  total = (
      20 * info["consistency_loss"] + 0.1 * info["reward_loss"]
      + 0.1 * info["value_loss"] + 2 * info["termination_loss"]
  )  # fmt: skip
  np.testing.assert_allclose(info["total_loss"], total, rtol=1e-5)


def test_f1_by_hand():
  logits = jnp.array([1.0, 2.0, -1.0, -3.0, 4.0])
  flags = jnp.array([1.0, 0.0, 1.0, 0.0, 1.0])
  assert losses.termination_f1(logits, flags) == pytest.approx(2 / 3, rel=1e-5)
  assert losses.termination_f1(-jnp.ones(3), jnp.zeros(3)) == 0.0


def test_scan_of_updates_equals_a_loop_and_compiles_once():
  traces = []

  def body(learner, inputs):
    traces.append(None)
    batch, draws = inputs
    return update_lib.update(MULTI, learner, batch, draws)

  scan = jit(lambda learner, xs: jax.lax.scan(body, learner, xs), donate_argnums=0)
  inputs = [
      (make_batch(MULTI, seed), draw(MULTI, jax.random.key(seed), B))
      for seed in range(3)
  ]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *inputs)
  looped = make_learner(MULTI)
  for batch, draws in inputs:
    looped, info = update(MULTI, looped, batch, draws)
  scanned, infos = scan(make_learner(MULTI), stacked)
  assert scanned.updates == 3 and looped.updates == 3
  assert_trees(scanned, looped, rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(infos["total_loss"][-1], info["total_loss"], rtol=1e-4)
  # The state that comes out goes in again without another compilation.
  scanned, _ = scan(scanned, stacked)
  assert len(traces) == 1 and scan._cache_size() == 1
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(scanned))
