"""Settings as YAML: presets to read, and the record in a run directory."""

import dataclasses
import pathlib
import typing
from typing import Any

import yaml

from mjx_tdmpc2.settings import Config
from mjx_tdmpc2.validation import ConfigError, alternatives, check_value, near_miss


def load_yaml(path: str | pathlib.Path) -> dict[str, Any]:
  """Reads a file with some fields of `Config`.

  Raises:
    ConfigError: the file cannot be read, is no mapping, or has an unknown key or a
      value of the wrong type.
  """
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8")
  except (OSError, UnicodeError) as error:
    reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
    raise ConfigError(f"Cannot read the settings in {path}: {reason}.") from None
  try:
    values = yaml.safe_load(text)
  except yaml.YAMLError as error:
    mark = getattr(error, "problem_mark", None)
    where = f", line {mark.line + 1}" if mark else ""
    raise ConfigError(f"{path}{where} is not valid YAML.") from None
  if values is None:
    return {}
  if not isinstance(values, dict):
    raise ConfigError(
      f"{path} should hold lines of the form `key: value`, got a"
      f" {type(values).__name__}."
    )
  return {key: _read_value(path, key, value) for key, value in values.items()}


def merge(config: Config, values: dict[str, Any]) -> Config:
  """`config` with some fields replaced."""
  return dataclasses.replace(config, **values)


def dump(config: Config) -> str:
  """All settings as YAML text that `load_yaml` reads back."""
  return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _read_value(path: str | pathlib.Path, key: Any, value: Any) -> Any:
  hints = typing.get_type_hints(Config)
  if key not in hints:
    hint = near_miss(str(key).replace("-", "_"), hints)
    raise ConfigError(
      f"{path} has the unknown key {key!r}."
      + (hint or f" Valid keys: {', '.join(hints)}.")
    )
  if float in alternatives(hints[key]):
    value = _as_float(value)
  check_value(f"{key} in {path}", hints[key], value)
  return value


def _as_float(value: Any) -> Any:
  """A number as float; YAML 1.1 takes 3e-4, without a point, for text."""
  if isinstance(value, bool) or not isinstance(value, (int, float, str)):
    return value
  try:
    return float(value)
  except (ValueError, OverflowError):
    return value
