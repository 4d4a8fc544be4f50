"""Scalar transforms, two-hot distributions and the running scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjx_tdmpc2 import math

VMIN, VMAX, BINS = -10.0, 10.0, 101


def _two_hot(x):
  return np.asarray(math.two_hot(jnp.asarray(x, jnp.float32), VMIN, VMAX, BINS))


def test_symexp_inverts_symlog():
  x = jnp.array([-2e4, -3.0, -1e-4, 0.0, 1e-4, 0.5, 7.0, 2e4], jnp.float32)
  np.testing.assert_allclose(math.symexp(math.symlog(x)), x, rtol=2e-6)
  np.testing.assert_allclose(math.symlog(x[-2]), np.log(8.0), rtol=1e-6)


def test_two_hot_splits_between_the_neighbouring_bins():
  # symlog(x) = 0.05 lies a quarter of the way from bin 50 (0) to bin 51 (0.2).
  weights = _two_hot(np.expm1(0.05))
  assert weights[50] == pytest.approx(0.75, abs=1e-5)
  assert weights[51] == pytest.approx(0.25, abs=1e-5)
  assert np.count_nonzero(weights) == 2


@pytest.mark.parametrize(
    "x, hot",
    [(0.0, 50), (1e9, 100), (-1e9, 0), (np.expm1(10.0), 100), (-np.expm1(10.0), 0)],
)
def test_two_hot_on_a_bin_and_beyond_the_edges(x, hot):
  weights = _two_hot(x)
  assert weights[hot] == pytest.approx(1.0, abs=1e-4)
  assert weights.sum() == pytest.approx(1.0, abs=1e-6)
  assert (weights >= 0).all()


def test_two_hot_sums_to_one_and_decodes_to_the_value():
  x = np.concatenate([-np.logspace(-3, 4, 400), np.logspace(-3, 4, 400)])
  weights = _two_hot(x)
  np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
  decoded = math.two_hot_inv(jnp.log(weights + 1e-30), VMIN, VMAX)
  np.testing.assert_allclose(decoded, x, rtol=2e-4, atol=2e-5)


def test_decode_takes_the_expectation_in_symlog_space():
  logits = jnp.full(BINS, -1e9).at[jnp.array([50, 60])].set(0.0)  # symlog 0 and 2
  assert math.two_hot_inv(logits, VMIN, VMAX) == pytest.approx(np.expm1(1.0), rel=1e-5)
  assert math.two_hot_inv(jnp.zeros(BINS), VMIN, VMAX) == pytest.approx(0.0, abs=1e-5)


def test_soft_ce_is_the_cross_entropy():
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(7, BINS)), jnp.float32)
  weights = math.two_hot(jnp.linspace(-5.0, 50.0, 7), VMIN, VMAX, BINS)
  expected = -(weights * jax.nn.log_softmax(logits)).sum(-1)
  np.testing.assert_allclose(math.soft_ce(logits, weights), expected, rtol=1e-5)


def test_gaussian_terms_are_a_log_density_without_constant():
  eps, log_std = np.array([0.3, -1.2]), np.array([-1.0, 0.5])
  std = np.exp(log_std)
  density = np.prod(np.exp(-0.5 * eps**2) / (std * np.sqrt(2 * np.pi)))
  terms = math.gaussian_log_prob_terms(jnp.asarray(eps), jnp.asarray(log_std))
  assert terms - 2 * math.HALF_LOG_2PI == pytest.approx(np.log(density), rel=1e-5)


def test_tanh_log_det_and_its_gradient_are_finite_at_the_bounds():
  action = jnp.array([0.5, 1.0, -1.0])
  assert math.tanh_log_det(action) == pytest.approx(
      np.log(0.75 + 1e-6) + 2 * np.log(1e-6), rel=1e-5
  )
  assert np.isfinite(jax.grad(math.tanh_log_det)(action)).all()


@pytest.mark.parametrize("size", [1, 2, 16, 255, 256])
def test_percentile_range_matches_linear_interpolation(size):
  x = np.random.default_rng(size).normal(size=size).astype(np.float32) * 5
  expected = np.subtract(*np.percentile(x, [95, 5]))
  assert math.percentile_range(jnp.asarray(x)) == pytest.approx(expected, abs=1e-4)


def test_scale_moves_by_tau_and_never_below_one():
  x = jnp.arange(101.0)  # 5 % and 95 % at 5 and 95
  assert math.update_scale(jnp.float32(1.0), x, 0.01) == pytest.approx(1.89, rel=1e-5)
  assert math.update_scale(jnp.float32(1.0), x / 1e3, 0.5) == 1.0
  assert math.update_scale(jnp.float32(3.0), x * 0, 0.5) == 2.0


@pytest.mark.parametrize("length, gamma", [(500, 0.99), (100, 0.95), (5000, 0.995)])
def test_discount_heuristic(length, gamma):
  assert math.discount_heuristic(length) == pytest.approx(gamma)
