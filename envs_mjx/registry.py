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


# The 39 DMControl tasks of the TD-MPC2 paper.
_PAPER = """
  acrobot-swingup cartpole-balance cartpole-balance-sparse cartpole-swingup
  cartpole-swingup-sparse cheetah-jump cheetah-run cheetah-run-back
  cheetah-run-backwards cheetah-run-front cup-catch cup-spin dog-run dog-stand dog-trot
  dog-walk finger-spin finger-turn-easy finger-turn-hard fish-swim hopper-hop
  hopper-hop-backwards hopper-stand humanoid-run humanoid-stand humanoid-walk
  pendulum-spin pendulum-swingup quadruped-run quadruped-walk reacher-easy reacher-hard
  reacher-three-easy reacher-three-hard walker-run walker-run-backwards walker-stand
  walker-walk walker-walk-backwards
""".split()  # noqa: SIM905

_FACTORIES = _collect()
# The paper's tasks, and those that it does not have. Dog is not there yet.
TASKS: tuple[str, ...] = tuple(name for name in _PAPER if name in _FACTORIES)
EXTRA_TASKS: tuple[str, ...] = tuple(n for n in _FACTORIES if n not in _PAPER)
ALL_TASKS: tuple[str, ...] = TASKS + EXTRA_TASKS


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
    name: one of `TASKS` or `EXTRA_TASKS`, such as "cheetah-run".

  Raises:
    ValueError: there is no such task; the message lists near misses.
  """
  canonical = canonical_name(name)
  if canonical not in _FACTORIES:
    near = difflib.get_close_matches(canonical, ALL_TASKS, n=5, cutoff=0.5)
    listing = "did you mean " if near else "choose one of "
    raise ValueError(
      f"unknown task {name!r}: {listing}{', '.join(near or ALL_TASKS)}?"
    )
  return TaskEnv(canonical, _FACTORIES[canonical]())
