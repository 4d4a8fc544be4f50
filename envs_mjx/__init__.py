"""dm_control's suite in JAX: the same tasks, pure functions, any batch size."""

from envs_mjx.base import Env, EnvSpec, EnvState, PhysicsState
from envs_mjx.registry import ALL_TASKS, EXTRA_TASKS, TASKS, make

__all__ = [
  "ALL_TASKS",
  "EXTRA_TASKS",
  "TASKS",
  "Env",
  "EnvSpec",
  "EnvState",
  "PhysicsState",
  "make",
]
