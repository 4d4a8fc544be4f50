"""Tasks, and the environment that any task makes with its physics.

A task says how episodes begin, what is observed and what is rewarded; it is a small
class per domain with a few settings. `TaskEnv` steps it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_mjx.base import EnvSpec, EnvState, PhysicsState
from envs_mjx.physics import Physics, View


class Start(NamedTuple):
  """Where an episode begins; None stands for zeros, or nothing.

  qpos: f32[nq]; qvel: f32[nv]; act: f32[na]; qacc_warmstart: f32[nv].
  params: what else the reset drew. dm_control writes such things into the model; here
    each is named after the model's field, FIELD.OBJECT, as in "geom_pos.target".
  """

  qpos: jax.Array
  qvel: jax.Array | None = None
  act: jax.Array | None = None
  qacc_warmstart: jax.Array | None = None
  params: dict[str, jax.Array] | None = None


class Task:
  """Base class: a task over a `Physics`.

  Subclasses set `physics` and `obs_size` and define the three methods below, all pure.

  Attributes:
    physics: steps the task's model.
    obs_size: length S of the observation.
    episode_length: T, agent steps until the time limit.
  """

  physics: Physics
  obs_size: int
  episode_length: int = 500

  def initialize(self, key: jax.Array) -> Start:
    """Draws a start from the task's initial distribution."""
    raise NotImplementedError

  def observation(self, view: View) -> jax.Array:
    """Returns the flat observation f32[S], in dm_control's key order."""
    raise NotImplementedError

  def reward(self, view: View) -> jax.Array:
    """Returns the reward f32[] of one control step that led to `view`."""
    raise NotImplementedError


def _full_precision(method: Callable) -> Callable:
  """Traces a method with full-precision matrix products, whatever the caller set."""

  @functools.wraps(method)
  def wrapped(*args, **kwargs):
    with jax.default_matmul_precision("highest"):
      return method(*args, **kwargs)

  return wrapped


class TaskEnv:
  """The environment of a task: pure, for one environment, never self-resetting."""

  def __init__(self, name: str, task: Task, action_repeat: int = 2):
    """Builds the environment.

    Args:
      name: registry name.
      task: what is initialised, observed and rewarded.
      action_repeat: control steps per agent step; their rewards are summed.

    Raises:
      ValueError: an actuator of the model has no control range.
    """
    self.task = task
    model = task.physics.model
    if not np.all(model.actuator_ctrllimited):
      raise ValueError(
        f"{name}: every actuator needs a control range to scale actions to; "
        f"limit actuators {np.flatnonzero(~model.actuator_ctrllimited).tolist()}."
      )
    low, high = model.actuator_ctrlrange.T
    # Around the centre, so that ranges of [-1, 1] pass actions through unchanged.
    self._ctrl_center = np.float32((low + high) / 2)
    self._ctrl_half_range = np.float32((high - low) / 2)
    self.spec = EnvSpec(
      name=name,
      obs_size=task.obs_size,
      action_size=int(model.nu),
      episode_length=task.episode_length,
      action_repeat=action_repeat,
      control_timestep=task.physics.control_timestep,
    )

  @_full_precision
  def reset(self, key: jax.Array) -> EnvState:
    """Draws an initial state from the task's distribution."""
    start = self.task.initialize(key)
    physics = self.task.physics.initial(
      start.qpos, start.qvel, start.act, start.qacc_warmstart
    )
    return self.state_from_physics(physics, start.params or {})

  @_full_precision
  def state_from_physics(
    self, physics: PhysicsState, params: dict[str, jax.Array]
  ) -> EnvState:
    """An environment at the start of an episode, in a given physics state.

    Args:
      physics: the state, readings of the acceleration stage included.
      params: the task's parameters, as in `Start.params`.
    """
    ctrl = jnp.zeros(self.spec.action_size, jnp.float32)
    view = self.task.physics.view(physics, ctrl, params)
    return EnvState(
      physics=physics,
      task=params,
      obs=self._observe(view),
      reward=jnp.float32(0.0),
      terminated=jnp.bool_(False),
      truncated=jnp.bool_(False),
      step=jnp.int32(0),
      contact_overflow=jnp.int32(0),
    )

  @_full_precision
  def step(self, state: EnvState, action: jax.Array) -> EnvState:
    """Applies one action f32[A] for `spec.action_repeat` control steps."""
    ctrl = self.control(action)

    def control_step(carry, _):
      physics, _, reward, overflow = carry
      physics, full = self.task.physics.control_step(physics, ctrl)
      view = self.task.physics.view(physics, ctrl, state.task)
      reward += jnp.asarray(self.task.reward(view), jnp.float32)
      return (physics, self._observe(view), reward, overflow + full), None

    carry = (state.physics, state.obs, jnp.float32(0.0), jnp.int32(0))
    (physics, obs, reward, overflow), _ = jax.lax.scan(
      control_step, carry, length=self.spec.action_repeat
    )
    step = state.step + 1
    return state.replace(
      physics=physics,
      obs=obs,
      reward=reward,
      truncated=step >= self.spec.episode_length,
      step=step,
      contact_overflow=overflow,
    )

  def control(self, action: jax.Array) -> jax.Array:
    """Scales an action in [-1, 1] to the actuators' ranges, without clipping."""
    return self._ctrl_center + self._ctrl_half_range * action

  def _observe(self, view: View) -> jax.Array:
    obs = jnp.asarray(self.task.observation(view), jnp.float32)
    if obs.shape != (self.spec.obs_size,):
      raise ValueError(
        f"{self.spec.name}: observation has shape {obs.shape}, but the task declares "
        f"obs_size = {self.spec.obs_size}; make them agree."
      )
    return obs
