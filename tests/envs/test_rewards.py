"""`tolerance` against dm_control's, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_control.utils import rewards as theirs

from envs_mjx import rewards as ours

SIGMOIDS = (
  "gaussian", "hyperbolic", "long_tail", "reciprocal",
  "cosine", "linear", "quadratic", "tanh_squared",
)  # fmt: skip
ZERO_ALLOWED = ("cosine", "linear", "quadratic")


@pytest.mark.parametrize("sigmoid", SIGMOIDS)
def test_equals_dm_control(sigmoid):
  rng = np.random.RandomState(SIGMOIDS.index(sigmoid))
  for i in range(60):
    lower = float(rng.uniform(-2, 2))
    upper = [lower, lower + float(rng.uniform(0, 2)), np.inf][i % 3]
    lower = -np.inf if i % 5 == 0 else lower
    settings = {
      "bounds": (lower, upper),
      "margin": float(10 ** rng.uniform(-1, 1)),
      "sigmoid": sigmoid,
      "value_at_margin": float(rng.uniform(0.01, 0.99)),
    }
    if sigmoid in ZERO_ALLOWED and i % 4 == 0:
      settings["value_at_margin"] = 0.0
    x = np.float32(rng.uniform(-8, 8, 100))
    expected = theirs.tolerance(x.astype(np.float64), **settings)
    got = ours.tolerance(x, **settings)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6, err_msg=settings)


def test_no_margin_is_an_indicator_with_both_bounds_in():
  x = jnp.array([-0.1, 0.0, 0.5, 1.0, 1.1])
  np.testing.assert_array_equal(ours.tolerance(x, (0.0, 1.0)), [0, 1, 1, 1, 0])


def test_value_at_the_margin():
  for sigmoid in SIGMOIDS:
    value = ours.tolerance(3.0, (0.0, 1.0), 2.0, sigmoid, value_at_margin=0.3)
    assert value == pytest.approx(0.3, abs=1e-6), sigmoid


@pytest.mark.parametrize("sigmoid", SIGMOIDS)
def test_gradients_are_finite_with_an_infinite_bound(sigmoid):
  fn = jax.grad(lambda x: ours.tolerance(x, (1.0, np.inf), 2.0, sigmoid))
  for x in (-1.0, 1.0, 4.0):
    assert np.isfinite(fn(x))


@pytest.mark.parametrize(
  "settings, word",
  [
    ({"bounds": (1.0, 0.0)}, "bounds"),
    ({"margin": -1.0}, "margin"),
    ({"margin": 1.0, "sigmoid": "step"}, "sigmoid"),
    ({"margin": 1.0, "value_at_margin": 0.0}, "value_at_margin"),
    ({"margin": 1.0, "sigmoid": "linear", "value_at_margin": 1.0}, "value_at_margin"),
  ],
)
def test_errors_name_the_setting(settings, word):
  with pytest.raises(ValueError, match=word):
    ours.tolerance(0.0, **settings)
