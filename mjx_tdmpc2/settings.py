"""The settings of a run as a user gives them: command-line flags and YAML keys.

None stands for a value that follows from others; `config.resolve` says which.
"""

import dataclasses
from typing import Literal

ModelSize = Literal[1, 5, 19, 48, 317]
Semantics = Literal["paper", "head"]
Insertion = Literal["step", "episode"]
Precision = Literal["high", "highest", "bfloat16"]
Platform = Literal["cpu", "gpu", "tpu"]
Prng = Literal["threefry2x32", "rbg", "unsafe_rbg"]
QLayout = Literal["list", "stacked"]


@dataclasses.dataclass(frozen=True)
class Config:
  """How a run is done."""

  task: str = "cheetah-run"
  """Task to learn; --list-tasks prints all."""
  num_envs: int = 256
  """Environments that run side by side."""
  seed: int = 1
  """Seed of the whole run."""
  name: str = "default"
  """Name of the experiment, a part of the run directory."""
  total_steps: int | None = None
  """Agent steps, all environments together. None: 2 million; dog, humanoid: 7."""

  model_size: ModelSize = 5
  """Millions of parameters; sets the sizes of the networks."""
  semantics: Semantics = "paper"
  """The code that made the paper's curves, or the repository's newest state."""
  mpc: bool = True
  """Act by planning; --no-mpc acts by the policy alone."""
  utd: float = 1.0
  """Updates per agent step."""
  seed_steps: int | None = None
  """Agent steps with random actions at the start. None: max(1000, 5 episodes)."""
  buffer_size: int | None = None
  """Transitions in the replay buffer. None: 1 million, fewer in a shorter run."""
  insertion: Insertion = "step"
  """When transitions may be drawn: at once, or when their episode has ended."""
  stagger: bool = False
  """Shorten first episodes differently, so that later ones end at different times."""
  episodic: bool = False
  """Learn when episodes terminate, for tasks that end before their time limit."""

  eval_freq: int = 50_000
  """Agent steps between evaluations; 0: never, but at the end."""
  eval_episodes: int = 10
  """Episodes in one evaluation."""
  checkpoint_freq: int = 50_000
  """Agent steps between checkpoints; 0: none, but at the end."""
  log_freq: int = 1_000
  """Agent steps between rows of metrics; 0: none, but at the end."""

  platform: Platform | None = None
  """Where to compute. None: JAX chooses."""
  matmul_precision: Precision = "high"
  """Precision of the networks' matrix products; physics always has the highest."""
  prng: Prng = "threefry2x32"
  """Generator of random numbers."""
  plan_chunk: int | None = None
  """Environments planned together; 0: all. None: all, on a CPU what fits its cache."""
  q_layout: QLayout | None = None
  """How Q heads are evaluated. None: list on a CPU, else stacked."""
  reset_batch: int | None = None
  """Environments that one reset call serves. None: an eighth of num_envs."""
  cache_dir: str | None = None
  """Compiled programs. None: $JAX_COMPILATION_CACHE_DIR or ~/.cache/mjx-tdmpc2."""

  enc_dim: int | None = None
  """Width of the encoder. None: by model_size, as for the next four."""
  mlp_dim: int | None = None
  """Width of the other networks."""
  latent_dim: int | None = None
  """Size of the latent state."""
  num_enc_layers: int | None = None
  """Layers of the encoder."""
  num_q: int | None = None
  """Q functions in the ensemble."""
  simnorm_dim: int = 8
  """Size of a SimNorm group; divides latent_dim."""
  num_bins: int = 101
  """Bins of the reward and value distributions."""
  vmin: float = -10.0
  """Lowest bin, in symlog space."""
  vmax: float = 10.0
  """Highest bin, in symlog space."""
  dropout: float = 0.01
  """Dropout rate of the Q functions."""
  log_std_min: float = -10.0
  """Least log standard deviation of the policy."""
  log_std_max: float = 2.0
  """Largest log standard deviation of the policy."""
  entropy_form: Semantics | None = None
  """Form of the policy's entropy term. None: by semantics."""
  q_dropout_form: Semantics | None = None
  """Where Q dropout is active. None: by semantics."""

  batch_size: int = 256
  """Windows in one update."""
  horizon: int = 3
  """Steps of a training window and of a plan."""
  rho: float = 0.5
  """Weight of a step in the losses, relative to the step before."""
  consistency_coef: float = 20.0
  """Weight of the consistency loss."""
  reward_coef: float = 0.1
  """Weight of the reward loss."""
  value_coef: float = 0.1
  """Weight of the value loss."""
  termination_coef: float = 1.0
  """Weight of the termination loss."""
  entropy_coef: float = 1e-4
  """Weight of the policy's entropy."""
  lr: float = 3e-4
  """Learning rate."""
  enc_lr_scale: float = 0.3
  """The encoder's learning rate, relative to lr."""
  grad_clip_norm: float = 20.0
  """Largest norm of the world model's gradient, and of the policy's."""
  tau: float = 0.01
  """Rate at which target Q functions follow."""
  discount_denom: float = 5.0
  """The discount of a T-step episode is 1 - discount_denom/T, within the bounds."""
  discount_min: float = 0.95
  """Least discount."""
  discount_max: float = 0.995
  """Largest discount."""

  iterations: int | None = None
  """Iterations of the planner. None: 6, with 20 or more action dimensions 8."""
  num_samples: int = 512
  """Candidate action sequences in one iteration."""
  num_pi_trajs: int = 24
  """Candidates among them that the policy proposes."""
  num_elites: int = 64
  """Best candidates, which the next mean and deviation come from."""
  min_std: float = 0.05
  """Least standard deviation of the candidates."""
  max_std: float = 2.0
  """Largest standard deviation, with which planning starts."""
  temperature: float = 0.5
  """Weight of a value difference between elites."""
  uncertainty_coef: float = 0.0
  """Penalty on the disagreement of Q functions in planning."""
