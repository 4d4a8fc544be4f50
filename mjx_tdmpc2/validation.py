"""Checks of settings, each failing with one sentence for the user."""

import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mjx_tdmpc2.settings import Config

if TYPE_CHECKING:
  from envs_mjx.base import EnvSpec

INT32_MAX = 2**31 - 1


class ConfigError(ValueError):
  """Wrong settings; the message is one sentence for the user."""


def flag(field: str) -> str:
  """The command-line flag of a field of `Config`."""
  return "--" + field.replace("_", "-")


def near_miss(word: str, valid: Iterable[str]) -> str:
  """The close valid words as a question, or nothing where none is close."""
  close = difflib.get_close_matches(word, list(valid), n=2, cutoff=0.6)
  return f" Did you mean {' or '.join(close)}?" if close else ""


def alternatives(hint) -> tuple:
  """The types that an annotation allows: one, or those of a union."""
  is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  return typing.get_args(hint) if is_union else (hint,)


def choices(hint) -> tuple:
  """The values that a `Literal`, or a union with one, allows; () for others."""
  for kind in alternatives(hint):
    if typing.get_origin(kind) is typing.Literal:
      return typing.get_args(kind)
  return ()


def describe(hint) -> str:
  """What a setting of this type expects, in words."""
  words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
  parts = []
  for kind in alternatives(hint):
    if values := choices(kind):
      parts.append("one of " + ", ".join(map(str, values)))
    else:
      parts.append("none" if kind is type(None) else words[kind])
  return " or ".join(parts)


def fits(hint, value) -> bool:
  """Whether a value has the type that a field's annotation asks for."""
  for kind in alternatives(hint):
    if values := choices(kind):
      # True == 1, but it is no model size.
      if any(value == v and type(value) is type(v) for v in values):
        return True
    elif kind is float:
      is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
      if is_number and math.isfinite(value):
        return True
    elif type(value) is kind:
      return True
  return False


# Bounds of single fields: (lowest, highest), None for no bound.
_BOUNDS = {
  (1, INT32_MAX): (
    "num_envs total_steps seed_steps buffer_size eval_episodes enc_dim mlp_dim"
    " latent_dim num_enc_layers simnorm_dim batch_size horizon iterations"
    " num_samples num_elites reset_batch"
  ),
  (2, INT32_MAX): "num_q num_bins",
  (0, INT32_MAX): (
    "eval_freq checkpoint_freq log_freq plan_chunk num_pi_trajs seed"
  ),
  (0.0, None): (
    "utd consistency_coef reward_coef value_coef termination_coef entropy_coef"
    " enc_lr_scale uncertainty_coef temperature discount_denom"
  ),
  (0.0, 1.0): "rho tau discount_min discount_max dropout",
}
_POSITIVE = ("lr", "min_std", "max_std", "grad_clip_norm", "utd")


def check_value(label: str, hint, value) -> None:
  """Checks a value's type.

  Args:
    label: how the user knows the setting.
    hint: the field's annotation.
    value: the value.

  Raises:
    ConfigError: it is of another type, or no valid choice.
  """
  if not fits(hint, value):
    raise ConfigError(
      f"{label} expects {describe(hint)}, got {value!r}."
      f"{near_miss(str(value), map(str, choices(hint)))}"
    )


def check_fields(config: Config) -> None:
  """Checks every field by itself.

  Raises:
    ConfigError: the first field found wrong.
  """
  for name, hint in typing.get_type_hints(Config).items():
    check_value(flag(name), hint, getattr(config, name))
  for (low, high), names in _BOUNDS.items():
    for name in names.split():
      value = getattr(config, name)
      if value is None or (value >= low and (high is None or value <= high)):
        continue
      bound = f"at least {low}" if value < low else f"at most {high}"
      raise ConfigError(f"{flag(name)} must be {bound}, got {value}.")
  for name in _POSITIVE:
    if not getattr(config, name) > 0:
      raise ConfigError(
        f"{flag(name)} must be greater than 0, got {getattr(config, name)}."
      )
  if config.name in ("", ".", "..") or set(config.name) & set("/\\\0"):
    raise ConfigError(
      f"--name is one part of a path, got {config.name!r}; leave out slashes, or give"
      " the whole path with --run-dir."
    )


def check_together(config: Config, env_spec: "EnvSpec") -> None:
  """Checks completed settings against each other and the environment.

  Raises:
    ConfigError: the first pair found wrong.
  """
  c = config
  wrong = [
    (
      round(c.utd * c.num_envs) < 1,
      f"--utd {c.utd} with {c.num_envs} environments rounds to no update after a"
      f" vector step; give 1/{c.num_envs} or more.",
    ),
    (
      c.horizon > env_spec.episode_length,
      f"--horizon {c.horizon} is longer than an episode of {env_spec.name}, which has"
      f" {env_spec.episode_length} steps; give a shorter one.",
    ),
    (
      c.latent_dim % c.simnorm_dim,
      f"--latent-dim {c.latent_dim} is not divisible by --simnorm-dim"
      f" {c.simnorm_dim}; change one of them.",
    ),
    (
      c.num_elites > c.num_samples,
      f"--num-elites {c.num_elites} is more than --num-samples {c.num_samples}; elites"
      " are chosen among the samples.",
    ),
    (
      c.num_pi_trajs >= c.num_samples,
      f"--num-pi-trajs {c.num_pi_trajs} leaves nothing of --num-samples"
      f" {c.num_samples} for the planner; give a smaller number.",
    ),
    (c.dropout == 1, "--dropout must be less than 1, got 1."),
    (
      c.reset_batch is not None and c.reset_batch > c.num_envs,
      f"--reset-batch {c.reset_batch} is more than --num-envs {c.num_envs}; give a"
      " smaller one.",
    ),
  ]
  wrong += [
    (
      getattr(c, low) >= getattr(c, high),
      f"{flag(low)} {getattr(c, low)} must be less than {flag(high)}"
      f" {getattr(c, high)}.",
    )
    for low, high in (
      ("vmin", "vmax"),
      ("log_std_min", "log_std_max"),
      ("min_std", "max_std"),
    )
  ]
  wrong.append((
    c.discount_min > c.discount_max,
    f"--discount-min {c.discount_min} is more than --discount-max {c.discount_max}.",
  ))
  for is_wrong, message in wrong:
    if is_wrong:
      raise ConfigError(message)
