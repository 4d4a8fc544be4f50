"""Layers: activation, normalisation, dropout and initialisation."""

import jax
import jax.numpy as jnp
import numpy as np

from mjx_tdmpc2 import networks


def _layer(key, fan_in, fan_out):
  """A layer whose every parameter matters."""
  keys = jax.random.split(key, 4)
  return {
      "kernel": jax.random.normal(keys[0], (fan_in, fan_out)),
      "bias": jax.random.normal(keys[1], (fan_out,)),
      "ln_scale": 1.0 + 0.3 * jax.random.normal(keys[2], (fan_out,)),
      "ln_bias": jax.random.normal(keys[3], (fan_out,)),
  }


def _layer_norm(x, scale, bias):
  x = np.asarray(x, np.float64)
  centred = x - x.mean(-1, keepdims=True)
  variance = (centred**2).mean(-1, keepdims=True)
  return centred / np.sqrt(variance + 1e-5) * np.asarray(scale) + np.asarray(bias)


def test_mish_matches_its_definition():
  x = np.linspace(-30, 30, 4001).astype(np.float32)
  exact = x * np.tanh(np.logaddexp(0.0, x.astype(np.float64)))
  np.testing.assert_allclose(networks.mish(x), exact, rtol=1e-6, atol=1e-12)
  big = jnp.array([-1e4, -100.0, 100.0, 1e4])
  np.testing.assert_array_equal(networks.mish(big), [0.0, 0.0, 100.0, 1e4])


def test_layer_norm_epsilon_and_biased_variance():
  # Rows of standard deviation near sqrt(eps): another eps would show.
  x = 3e-3 * jax.random.normal(jax.random.key(0), (5, 8))
  scale, bias = jnp.linspace(0.5, 2.0, 8), jnp.linspace(-1.0, 1.0, 8)
  np.testing.assert_allclose(
      networks.layer_norm(x, scale, bias), _layer_norm(x, scale, bias), atol=2e-5
  )


def test_normed_linear_and_its_gradient():
  """Values and derivatives against plain formulas in float64."""
  layer = _layer(jax.random.key(1), 6, 10)
  x = jax.random.normal(jax.random.key(2), (4, 6))
  weight = jax.random.normal(jax.random.key(3), (4, 10))

  def plain(layer, x):
    h = x @ layer["kernel"] + layer["bias"]
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
    h = h * layer["ln_scale"] + layer["ln_bias"]
    return jnp.sum(weight * h * jnp.tanh(jax.nn.softplus(h)))

  def ours(layer, x):
    return jnp.sum(weight * networks.normed_linear(layer, x))

  expected = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(layer, x)
  got = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(layer, x)
  jax.tree.map(
      lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-4),
      got,
      expected,
  )


def test_gradients_are_finite_for_extreme_inputs():
  layer = _layer(jax.random.key(1), 2, 4)
  for x in (jnp.zeros((1, 2)), jnp.full((1, 2), 1e6), jnp.array([[-1e6, 1e6]])):
    grads = jax.grad(lambda lay, x=x: networks.normed_linear(lay, x).sum())(layer)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_simnorm_is_a_softmax_over_consecutive_groups():
  x = jax.random.normal(jax.random.key(0), (3, 24))
  out = np.asarray(networks.simnorm(x, 8))
  expected = np.exp(np.asarray(x, np.float64)).reshape(3, 3, 8)
  expected /= expected.sum(-1, keepdims=True)
  np.testing.assert_allclose(out, expected.reshape(3, 24), rtol=1e-5)


def test_linear_of_parts_is_linear_of_their_concatenation():
  layer = _layer(jax.random.key(1), 9, 5)
  parts = tuple(
      jax.random.normal(jax.random.key(i), (4, size)) for i, size in enumerate((6, 3))
  )
  whole = networks.linear(layer, jnp.concatenate(parts, axis=-1))
  np.testing.assert_allclose(networks.linear(layer, parts), whole, rtol=1e-5, atol=1e-5)


def test_dropout_sits_between_linear_and_layer_norm():
  layer, rate = _layer(jax.random.key(1), 6, 64), 0.25
  x, key = jax.random.normal(jax.random.key(2), (16, 6)), jax.random.key(3)
  kept = np.asarray(networks.dropout_mask(key, rate, (16, 64)))
  assert 0 < kept.sum() < kept.size
  h = np.asarray(x @ layer["kernel"] + layer["bias"], np.float64)
  h = _layer_norm(kept * h / (1 - rate), layer["ln_scale"], layer["ln_bias"])
  expected = h * np.tanh(np.logaddexp(0.0, h))
  out = networks.normed_linear(layer, x, dropout=(jnp.asarray(kept), rate))
  np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_only_the_first_layer_of_an_mlp_drops_units():
  layers = networks.init_mlp(jax.random.key(0), (4, 32, 32, 3))
  x = jax.random.normal(jax.random.key(1), (8, 4))
  dropout = (networks.dropout_mask(jax.random.key(2), 0.5, (8, 32)), 0.5)
  h = networks.normed_linear(layers[0], x, dropout=dropout)
  expected = networks.linear(layers[2], networks.normed_linear(layers[1], h))
  np.testing.assert_allclose(
      networks.mlp(layers, x, dropout=dropout), expected, rtol=1e-5, atol=1e-7
  )


def test_dropout_probability_is_right_to_one_in_ten_thousand():
  shape = (2**14, 2**10 - 1)
  mask = jax.jit(lambda key: networks.dropout_mask(key, 0.01, shape))
  dropped = ~np.asarray(mask(jax.random.key(7)))
  assert abs(dropped.mean() - 0.01) < 1e-4  # 4 standard deviations
  # As often by row, by unit, and by key as independent draws would.
  for axis in (0, 1):
    counts = dropped.sum(axis=axis)
    spread = counts.var() / (dropped.shape[axis] * 0.01 * 0.99)
    assert abs(spread - 1.0) < 5 * np.sqrt(2 / counts.size)
  # Two units are independent: neighbours, a row apart, and under another key.
  other = ~np.asarray(mask(jax.random.key(8)))
  pairs = [(dropped[:, :-lag], dropped[:, lag:]) for lag in (1, 2, 16, 512)]
  pairs += [(dropped[:-1], dropped[1:]), (dropped, other)]
  for a, b in pairs:
    assert abs(np.mean(a & b) - 1e-4) < 5 * np.sqrt(1e-4 / a.size)


def test_init_statistics():
  layers = networks.init_mlp(
      jax.random.key(0), (300, 400, 300), normed_last=True, zero_last=False
  )
  for layer in layers:
    kernel = np.asarray(layer["kernel"])
    assert abs(kernel.mean()) < 4 * 0.02 / np.sqrt(kernel.size)
    assert abs(kernel.std() / 0.02 - 1) < 0.01
    assert np.abs(kernel).max() > 0.07  # Not truncated at two deviations.
    assert (np.asarray(layer["bias"]) == 0).all()
    assert (np.asarray(layer["ln_scale"]) == 1).all()
    assert (np.asarray(layer["ln_bias"]) == 0).all()
  zeroed = networks.init_mlp(jax.random.key(0), (3, 4, 5), zero_last=True)
  assert (np.asarray(zeroed[1]["kernel"]) == 0).all()
  assert (np.asarray(zeroed[0]["kernel"]) != 0).any()
  assert "ln_scale" not in zeroed[1]
