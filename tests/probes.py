"""Environments with known answers, and small settings, for tests of the loop."""

import jax
import jax.numpy as jnp

from envs_mjx.base import EnvSpec, EnvState, PhysicsState
from mjx_tdmpc2.config import AgentConfig, Resolved


class CountingEnv:
  """Observes (draw of this reset, agent steps since it); reward is the first action.

  The draw is different in every reset, so a row of the replay tells which episode
  it belongs to. An action above `break_above` makes the physics state NaN.
  """

  def __init__(self, episode_length: int = 6, break_above: float = 2.0):
    self.spec = EnvSpec(
      name="counting", obs_size=2, action_size=2, episode_length=episode_length
    )
    self.break_above = break_above

  def reset(self, key: jax.Array) -> EnvState:
    draw = jax.random.uniform(key, (1,), minval=1.0, maxval=2.0)
    physics = PhysicsState(
      qpos=draw,
      qvel=jnp.zeros(1),
      act=jnp.zeros(0),
      qacc_warmstart=jnp.zeros(1),
      time=jnp.float32(0),
      sensordata=jnp.zeros(0),
    )
    return EnvState(
      physics=physics,
      task=(),
      obs=jnp.array([draw[0], 0.0]),
      reward=jnp.float32(0),
      terminated=jnp.bool_(False),
      truncated=jnp.bool_(False),
      step=jnp.int32(0),
      contact_overflow=jnp.int32(0),
    )

  def step(self, state: EnvState, action: jax.Array) -> EnvState:
    step = state.step + 1
    broken = jnp.where(action[0] > self.break_above, jnp.nan, 0.0)
    qpos = state.physics.qpos + broken
    return state.replace(
      physics=state.physics.replace(qpos=qpos, time=state.physics.time + 0.02),
      obs=jnp.array([qpos[0], jnp.float32(step)]),
      reward=action[0],
      truncated=step >= self.spec.episode_length,
      step=step,
      contact_overflow=jnp.int32(1),
    )


def small_agent(**changes) -> AgentConfig:
  """An agent that compiles and runs fast."""
  settings = dict(
    obs_size=2,
    action_size=2,
    enc_dim=16,
    mlp_dim=16,
    latent_dim=16,
    num_q=2,
    num_bins=11,
    batch_size=8,
    horizon=2,
    iterations=2,
    num_samples=16,
    num_pi_trajs=4,
    num_elites=4,
  )
  return AgentConfig(**(settings | changes))


def small_run(env=None, **changes) -> Resolved:
  """A run of `env` with two environments that compiles and runs fast."""
  env = env or CountingEnv()
  settings = dict(
    agent=small_agent(
      obs_size=env.spec.obs_size, action_size=env.spec.action_size
    ),
    task=env.spec.name,
    num_envs=2,
    episode_length=env.spec.episode_length,
    action_repeat=env.spec.action_repeat,
    updates_per_step=2,
    seed_steps=8,
    seed_vector_steps=4,
    burst_updates=8,
    total_vector_steps=40,
    slots=8,
    insertion="step",
    stagger=False,
    reset_batch=None,
    matmul_precision="highest",
    eval_episodes=3,
  )
  return Resolved(**(settings | changes))
