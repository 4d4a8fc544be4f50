"""Settings: what the agent's arithmetic depends on, and what a run depends on.

`Config` is what a user gives; `resolve` checks it against an environment and fills
in what follows from it.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

from mjx_tdmpc2.settings import Config
from mjx_tdmpc2.validation import ConfigError, check_fields, check_together

if TYPE_CHECKING:  # At run time it would import JAX, and make --help slow.
  from envs_mjx.base import EnvSpec

__all__ = [
  "AgentConfig",
  "Config",
  "ConfigError",
  "Resolved",
  "complete",
  "replay_slots",
  "resolve",
]

# Spec 1.20: (enc_dim, mlp_dim, latent_dim, num_enc_layers, num_q) by model size.
MODEL_SIZES = {
    1: (256, 384, 128, 2, 2),
    5: (256, 512, 512, 2, 5),
    19: (1024, 1024, 768, 3, 5),
    48: (1792, 1792, 768, 4, 5),
    317: (4096, 4096, 1376, 5, 8),
}


@dataclasses.dataclass(frozen=True)
class AgentConfig:
  """Everything the agent's arithmetic depends on; static and hashable.

  Defaults are those of the paper for one task (model size 5).
  """

  obs_size: int
  action_size: int

  # Model (spec 1).
  enc_dim: int = 256
  mlp_dim: int = 512
  latent_dim: int = 512
  num_enc_layers: int = 2
  num_q: int = 5
  simnorm_dim: int = 8
  num_bins: int = 101
  vmin: float = -10.0
  vmax: float = 10.0
  dropout: float = 0.01
  log_std_min: float = -10.0
  log_std_max: float = 2.0
  episodic: bool = False

  # Tasks. Single task: action_dims empty, one discount, task_dim 0.
  task_dim: int = 0
  action_dims: tuple[int, ...] = ()
  discounts: tuple[float, ...] = (0.99,)

  # Update (spec 2).
  batch_size: int = 256
  horizon: int = 3
  rho: float = 0.5
  consistency_coef: float = 20.0
  reward_coef: float = 0.1
  value_coef: float = 0.1
  termination_coef: float = 1.0
  entropy_coef: float = 1e-4
  lr: float = 3e-4
  enc_lr_scale: float = 0.3
  grad_clip_norm: float = 20.0
  tau: float = 0.01

  # Planner (spec 3).
  mpc: bool = True
  iterations: int = 6
  num_samples: int = 512
  num_pi_trajs: int = 24
  num_elites: int = 64
  min_std: float = 0.05
  max_std: float = 2.0
  temperature: float = 0.5
  uncertainty_coef: float = 0.0
  plan_chunk: int = 0  # Environments planned together; 0 means all at once.

  # Semantics: "paper" or "head" each.
  entropy_form: str = "paper"
  q_dropout_form: str = "paper"  # paper: every Q pass; head: the two losses only.

  # Code shape only, results are the same: how the Q heads are evaluated,
  # "list" (one by one, fast on a CPU) or "stacked" (batched, fast on a GPU).
  q_layout: str = "list"

  @property
  def multitask(self) -> bool:
    return bool(self.action_dims)

  @property
  def num_tasks(self) -> int:
    return len(self.action_dims)


DEFAULT_BUFFER_SIZE = 1_000_000
DEFAULT_TOTAL_STEPS = 2_000_000
# The published budgets of the hardest domains.
LONG_TOTAL_STEPS = 7_000_000
LONG_DOMAINS = ("dog", "humanoid")
# One plan's largest activations should stay in a CPU core's cache.
_CPU_PLAN_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Resolved:
  """What a run does, with every number decided; static and hashable.

  Attributes:
    agent: the agent's settings.
    task: registry name.
    num_envs: n.
    episode_length: T, agent steps.
    action_repeat: environment steps in one agent step.
    updates_per_step: updates after every vector step past the seed phase.
    seed_steps: S, the agent steps that the seed phase was asked to have.
    seed_vector_steps: vector steps with random actions.
    burst_updates: updates between the seed phase and the first planned action.
    total_vector_steps: vector steps of the whole run.
    slots: episodes that the replay buffer holds.
    insertion: "step" or "episode".
    stagger: whether first episodes have different lengths.
    reset_batch: environments that one reset call serves; None: the wrapper's choice.
    matmul_precision: of the networks.
    eval_episodes: episodes in one evaluation.
  """

  agent: AgentConfig
  task: str
  num_envs: int
  episode_length: int
  action_repeat: int
  updates_per_step: int
  seed_steps: int
  seed_vector_steps: int
  burst_updates: int
  total_vector_steps: int
  slots: int
  insertion: str
  stagger: bool
  reset_batch: int | None
  matmul_precision: str
  eval_episodes: int

  @property
  def total_steps(self) -> int:
    """Agent steps of the whole run, whole vector steps."""
    return self.total_vector_steps * self.num_envs

  @property
  def buffer_size(self) -> int:
    """Transitions that the replay buffer holds."""
    return self.slots * self.episode_length


def resolve(config: Config, env_spec: "EnvSpec", backend: str) -> Resolved:
  """Checks the settings and decides every number of the run.

  Args:
    config: as given.
    env_spec: of `config.task`.
    backend: JAX's default backend: "cpu", "gpu" or "tpu".

  Raises:
    ConfigError: the first setting found wrong, with what was expected.
  """
  config = complete(config, env_spec)
  n, length = config.num_envs, env_spec.episode_length
  return Resolved(
    agent=_agent_config(config, env_spec, backend),
    task=config.task,
    num_envs=n,
    episode_length=length,
    action_repeat=env_spec.action_repeat,
    updates_per_step=round(config.utd * n),
    seed_steps=config.seed_steps,
    seed_vector_steps=_seed_vector_steps(config, length),
    burst_updates=round(config.utd * config.seed_steps),
    total_vector_steps=math.ceil(config.total_steps / n),
    slots=config.buffer_size // length,
    insertion=config.insertion,
    stagger=config.stagger,
    reset_batch=config.reset_batch,
    matmul_precision=config.matmul_precision,
    eval_episodes=config.eval_episodes,
  )


def complete(config: Config, env_spec: "EnvSpec") -> Config:
  """The checked settings with every None filled in that shapes the result.

  What depends on the machine (`platform`, `plan_chunk`, `q_layout`, `reset_batch`,
  `cache_dir`) stays as given. Completing twice changes nothing, so that a run
  directory can hold the completed settings. The task gets its registry name.

  Raises:
    ConfigError: as `resolve`.
  """
  check_fields(config)
  length = env_spec.episode_length
  total_steps = config.total_steps or _default_total_steps(env_spec.name)
  enc_dim, mlp_dim, latent_dim, num_enc_layers, num_q = MODEL_SIZES[config.model_size]
  derived = {
    "total_steps": total_steps,
    "seed_steps": max(1000, 5 * length),
    "buffer_size": length
    * replay_slots(config.buffer_size, total_steps, config.num_envs, length),
    "enc_dim": enc_dim,
    "mlp_dim": mlp_dim,
    "latent_dim": latent_dim,
    "num_enc_layers": num_enc_layers,
    "num_q": num_q,
    "entropy_form": config.semantics,
    "q_dropout_form": config.semantics,
    # Spec 3.1: two more iterations for large action spaces.
    "iterations": 8 if env_spec.action_size >= 20 else 6,
  }
  missing = {k: v for k, v in derived.items() if getattr(config, k) is None}
  config = dataclasses.replace(config, task=env_spec.name, **missing)
  check_together(config, env_spec)
  return config


def replay_slots(
  buffer_size: int | None, total_steps: int, num_envs: int, episode_length: int
) -> int:
  """Episodes that the replay buffer holds.

  Every environment keeps one slot busy, so two for each are needed at least.

  Args:
    buffer_size: transitions; None stands for 1,000,000, or `total_steps` where that
      is smaller, or what the environments need where that is larger.
    total_steps: agent steps of the whole run.
    num_envs: n.
    episode_length: T.

  Raises:
    ConfigError: an explicit `buffer_size` is too small.
  """
  smallest = 2 * num_envs * episode_length
  if buffer_size is None:
    buffer_size = max(min(DEFAULT_BUFFER_SIZE, total_steps), smallest)
  elif buffer_size < smallest:
    raise ConfigError(
      f"--buffer-size {buffer_size} is too small for {num_envs} environments with"
      f" episodes of {episode_length} steps; give {smallest} or more."
    )
  return buffer_size // episode_length


def _default_total_steps(task: str) -> int:
  return LONG_TOTAL_STEPS if task.startswith(LONG_DOMAINS) else DEFAULT_TOTAL_STEPS


def _seed_vector_steps(config: Config, episode_length: int) -> int:
  """Vector steps with random actions."""
  steps = math.ceil(config.seed_steps / config.num_envs)
  if config.insertion == "step":
    return max(steps, config.horizon)  # One full window for every environment.
  # The reference makes one random action more than it asks for (spec 4.3), and an
  # episode can be drawn from the vector step after its last.
  return max(steps, episode_length) + 1


def _agent_config(config: Config, env_spec: "EnvSpec", backend: str) -> AgentConfig:
  """The agent's part of completed settings."""
  shared = {f.name for f in dataclasses.fields(Config)} & {
    f.name for f in dataclasses.fields(AgentConfig)
  }
  values = {name: getattr(config, name) for name in shared}
  values["plan_chunk"] = _plan_chunk(config, backend)
  values["q_layout"] = config.q_layout or ("list" if backend == "cpu" else "stacked")
  # Spec 2.20; 1 - denom/T equals (T/denom - 1)/(T/denom).
  discount = 1.0 - config.discount_denom / env_spec.episode_length
  discount = min(max(discount, config.discount_min), config.discount_max)
  return AgentConfig(
    obs_size=env_spec.obs_size,
    action_size=env_spec.action_size,
    discounts=(discount,),
    **values,
  )


def _plan_chunk(config: Config, backend: str) -> int:
  """Environments planned together, 0 for all."""
  if config.plan_chunk is not None:
    return config.plan_chunk
  if backend != "cpu":
    return 0
  bytes_each = 4 * config.num_samples * config.mlp_dim
  chunk = max(1, _CPU_PLAN_BYTES // bytes_each)
  return chunk if chunk < max(config.num_envs, config.eval_episodes) else 0
