"""Settings: what the agent's arithmetic depends on, and what a run depends on."""

import dataclasses

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

  # Semantics (DECISIONS 1): "paper" or "head" each.
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


class ConfigError(ValueError):
  """Wrong settings; the message is one sentence for the user."""


DEFAULT_BUFFER_SIZE = 1_000_000


def replay_slots(
  buffer_size: int | None, total_steps: int, num_envs: int, episode_length: int
) -> int:
  """Episodes that the replay buffer holds.

  Every environment keeps one slot busy, so at least two for each are needed.

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
      f"buffer-size {buffer_size} is too small for {num_envs} environments with"
      f" episodes of {episode_length} steps; the smallest possible is {smallest}."
    )
  return buffer_size // episode_length
