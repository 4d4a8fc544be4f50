"""MLPs with LayerNorm and Mish, as functions of explicit parameters.

An MLP is a tuple of layers. A layer is a dict with `kernel` [in, out] and `bias`
[out]; a layer that is normalised also has `ln_scale` [out] and `ln_bias` [out].
"""

import itertools
import math

import jax
import jax.numpy as jnp

Layer = dict[str, jax.Array]
Mlp = tuple[Layer, ...]
# (bool mask of the kept units, probability that a unit is dropped)
Dropout = tuple[jax.Array, float]

LN_EPS = 1e-5
INIT_STD = 0.02


def mish(x: jax.Array) -> jax.Array:
  """Mish, x·tanh(softplus(x)), in rational form (spec 1.1).

  With e = exp(x) and n = e(e + 2), tanh(softplus(x)) = n/(n + 2): one
  exponential in place of three transcendental functions, and more accurate.
  """
  e = jnp.exp(jnp.minimum(x, 20.0))  # Beyond 20 the quotient is 1 in float32.
  n = e * (e + 2.0)
  return x * n / (n + 2.0)


def simnorm(x: jax.Array, dim: int) -> jax.Array:
  """Softmax over consecutive groups of `dim` entries of [..., D] (Eq. 5, spec 1.3)."""
  groups = x.reshape(*x.shape[:-1], x.shape[-1] // dim, dim)
  return jax.nn.softmax(groups, axis=-1).reshape(x.shape)


def layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, centred: bool = False
) -> jax.Array:
  """LayerNorm over the last axis: biased two-pass variance, eps 1e-5 (spec 1.1).

  `centred` says that the mean of x over the last axis is known to be zero.
  """
  if not centred:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(variance + LN_EPS) * scale + bias


def centre(layer: Layer) -> Layer:
  """The same normalised layer with parameters that make its mean zero.

  The mean over the units is linear in the input: without the means of kernel and
  bias over the units, LayerNorm has none to take away. Not for a layer with
  dropout, which comes between the two.
  """
  kernel, bias = layer["kernel"], layer["bias"]
  return {
      **layer,
      "kernel": kernel - jnp.mean(kernel, axis=-1, keepdims=True),
      "bias": bias - jnp.mean(bias, axis=-1, keepdims=True),
      "centred": None,  # No array: a mark that `normed` looks for.
  }


def dropout_mask(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
  """Bool mask of the kept units, each kept with probability 1 - rate.

  The key draws two words; a hash of them and of the unit's index does the rest. It
  fuses into the layer that it masks: twenty times cheaper than the generator on a
  CPU, for which a decision or an update would pay 6 % of its time.
  """
  seed = jax.random.bits(key, (2,), jnp.uint32)
  x = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
  x = (x + seed[0]) * jnp.uint32(0x9E3779B1)
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15) ^ seed[1]) * jnp.uint32(0x846CA68B)
  return (x ^ (x >> 16)) >= jnp.uint32(round(rate * 2**32))


def apply_dropout(x: jax.Array, dropout: Dropout) -> jax.Array:
  """Inverted dropout: zeros units and scales the rest by 1/(1 - rate)."""
  kept, rate = dropout
  return jnp.where(kept, x / (1.0 - rate), 0.0)


def linear(layer: Layer, x: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
  """x·kernel + bias.

  Args:
    layer: parameters.
    x: inputs [..., in], or a tuple of arrays that stand for their concatenation:
      then each has its own product, so that a gradient with respect to one of
      them does not pay for the others.
  """
  if not isinstance(x, tuple):
    return x @ layer["kernel"] + layer["bias"]
  out, start = layer["bias"], 0
  for part in x:
    stop = start + part.shape[-1]
    out = out + part @ layer["kernel"][start:stop]
    start = stop
  return out


def normed(
    layer: Layer, h: jax.Array, act: str = "mish", simnorm_dim: int = 8
) -> jax.Array:
  """LayerNorm and activation, "mish" or "simnorm", of a linear part [..., out]."""
  h = layer_norm(h, layer["ln_scale"], layer["ln_bias"], "centred" in layer)
  return mish(h) if act == "mish" else simnorm(h, simnorm_dim)


def normed_linear(
    layer: Layer,
    x: jax.Array,
    act: str = "mish",
    dropout: Dropout | None = None,
    simnorm_dim: int = 8,
) -> jax.Array:
  """Linear, dropout if given, LayerNorm, activation, in this order (spec 1.1).

  Args:
    layer: parameters with `ln_scale` and `ln_bias`.
    x: inputs [..., in], or a tuple of parts as in `linear`.
    act: "mish" or "simnorm".
    dropout: (mask of kept units [..., out], rate), or None for no dropout.
    simnorm_dim: group size of SimNorm.

  Returns:
    Outputs [..., out].
  """
  h = linear(layer, x)
  if dropout is not None:
    h = apply_dropout(h, dropout)
  return normed(layer, h, act, simnorm_dim)


def mlp(
    layers: Mlp,
    x: jax.Array,
    last_act: str | None = None,
    dropout: Dropout | None = None,
    simnorm_dim: int = 8,
) -> jax.Array:
  """Applies an MLP (spec 1.2).

  Args:
    layers: parameters.
    x: inputs [..., in], or a tuple of parts as in `linear`.
    last_act: None for a plain linear last layer, "simnorm" for a normalised one.
    dropout: (mask of kept units, rate) for the first layer, or None.
    simnorm_dim: group size of SimNorm.

  Returns:
    Outputs [..., out].
  """
  for i, layer in enumerate(layers[:-1]):
    x = normed_linear(layer, x, dropout=dropout if i == 0 else None)
  if last_act is None:
    return linear(layers[-1], x)
  return normed_linear(layers[-1], x, last_act, simnorm_dim=simnorm_dim)


def init_mlp(
    key: jax.Array,
    sizes: tuple[int, ...],
    normed_last: bool = False,
    zero_last: bool = False,
) -> Mlp:
  """Initial parameters (spec 1.13): kernels N(0, 0.02²), biases 0, LayerNorm 1 and 0.

  Args:
    key: PRNG key.
    sizes: (in, hidden..., out).
    normed_last: whether the last layer has a LayerNorm.
    zero_last: whether the last kernel is zero.
  """
  layers = []
  last = len(sizes) - 2
  keys = jax.random.split(key, last + 1)
  for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
    kernel = INIT_STD * jax.random.normal(keys[i], (fan_in, fan_out), jnp.float32)
    if i == last and zero_last:
      kernel = jnp.zeros_like(kernel)
    layer = {"kernel": kernel, "bias": jnp.zeros(fan_out, jnp.float32)}
    if i < last or normed_last:
      layer["ln_scale"] = jnp.ones(fan_out, jnp.float32)
      layer["ln_bias"] = jnp.zeros(fan_out, jnp.float32)
    layers.append(layer)
  return tuple(layers)
