"""Environments by name."""

import difflib
import importlib
import pkgutil
from collections.abc import Callable

from envs_mjx import suite
from envs_mjx.task import Task, TaskEnv

# dm_control's spellings of domains whose names here are shorter.
_DOMAIN_ALIASES = {"ball-in-cup-": "cup-", "point-mass-": "pointmass-"}


def _collect() -> dict[str, Callable[[], Task]]:
  """Gathers the `TASKS` of every module of `envs_mjx.suite`, sorted by name."""
  factories = {}
  for module in pkgutil.iter_modules(suite.__path__, f"{suite.__name__}."):
    factories.update(importlib.import_module(module.name).TASKS)
  return dict(sorted(factories.items()))


_FACTORIES = _collect()
TASKS: tuple[str, ...] = tuple(_FACTORIES)


def canonical_name(name: str) -> str:
  """Returns a task's name as `TASKS` spells it, where it can be understood.

  Underscores and dm_control's domain names are accepted: "ball_in_cup-catch" and
  "cup_catch" are "cup-catch".
  """
  canonical = name.strip().lower().replace("_", "-")
  for theirs, ours in _DOMAIN_ALIASES.items():
    if canonical.startswith(theirs):
      canonical = ours + canonical.removeprefix(theirs)
  return canonical


def make(name: str) -> TaskEnv:
  """Builds the environment of a task.

  Args:
    name: one of `TASKS`, such as "cheetah-run".

  Raises:
    ValueError: there is no such task; the message lists near misses.
  """
  canonical = canonical_name(name)
  if canonical not in _FACTORIES:
    near = difflib.get_close_matches(canonical, TASKS, n=5, cutoff=0.5)
    listing = "did you mean " if near else "choose one of "
    raise ValueError(
      f"unknown task {name!r}: {listing}{', '.join(near or TASKS)}?"
    )
  return TaskEnv(canonical, _FACTORIES[canonical]())
