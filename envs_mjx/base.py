"""The environment protocol: a static description, a small state, two pure functions.

An environment is a pair of pure single-environment functions, `reset(key)` and
`step(state, action)`, that jit, vmap and scan. It never resets by itself; the
batch wrapper (`envs_mjx.wrappers.BatchEnv`) does.
"""

import dataclasses
from typing import Any, Protocol

import jax
from flax import struct


@dataclasses.dataclass(frozen=True)
class EnvSpec:
  """What is known of an environment before it runs; static and hashable.

  Attributes:
    name: registry name, e.g. "cheetah-run".
    obs_size: length S of the flat float32 observation.
    action_size: length A of the action; every entry lies in [-1, 1].
    episode_length: T, agent steps until the time limit.
    action_repeat: control steps in one agent step.
    control_timestep: seconds in one control step.
  """

  name: str
  obs_size: int
  action_size: int
  episode_length: int = 500
  action_repeat: int = 2
  control_timestep: float = 0.02


@struct.dataclass
class PhysicsState:
  """What the physics carries from one step to the next (and a checkpoint holds).

  Attributes:
    qpos: f32[nq] generalised positions.
    qvel: f32[nv] generalised velocities.
    act: f32[na] actuator activations.
    qacc_warmstart: f32[nv] the solver's starting point.
    time: f32[] seconds since the reset.
    sensordata: f32[nsensordata] sensor readings of the last substep, of which those
      of the acceleration stage (touch, force, ...) count: dm_control shows them one
      substep old. Length 0 where a task reads no sensor of that stage.
  """

  qpos: jax.Array
  qvel: jax.Array
  act: jax.Array
  qacc_warmstart: jax.Array
  time: jax.Array
  sensordata: jax.Array


@struct.dataclass
class EnvState:
  """State of one environment (every leaf gains a leading axis under vmap).

  Attributes:
    physics: the physics' carried state.
    task: what a reset drew beside the physics' state (targets, sizes); a pytree of
      arrays, empty where there is nothing.
    obs: f32[S] observation of this state.
    reward: f32[] reward of the agent step that led here (summed over the repeat).
    terminated: bool[] the task ended; no dm_control task ever does.
    truncated: bool[] the time limit was reached.
    step: i32[] agent steps since the reset.
    contact_overflow: i32[] physics substeps of the last agent step in which every
      contact slot was active, so that further contacts may have been left out. While
      it is 0, none was.
  """

  physics: PhysicsState
  task: Any
  obs: jax.Array
  reward: jax.Array
  terminated: jax.Array
  truncated: jax.Array
  step: jax.Array
  contact_overflow: jax.Array


class Env(Protocol):
  """What the batch wrapper and the trainer need of an environment."""

  spec: EnvSpec

  def reset(self, key: jax.Array) -> EnvState:
    """Draws an initial state from the task's distribution."""

  def step(self, state: EnvState, action: jax.Array) -> EnvState:
    """Applies one action f32[A] for `spec.action_repeat` control steps."""
