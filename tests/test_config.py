"""Settings: derived numbers, checks, and YAML files."""

import dataclasses
import math
import pathlib
import subprocess
import sys

import pytest

from envs_mjx.base import EnvSpec
from mjx_tdmpc2.config import (
  AgentConfig,
  Config,
  ConfigError,
  complete,
  replay_slots,
  resolve,
)
from mjx_tdmpc2.config_file import dump, load_yaml, merge

CHEETAH = EnvSpec("cheetah-run", obs_size=17, action_size=6)
DOG = EnvSpec("dog-run", obs_size=223, action_size=38)
PRESETS = pathlib.Path(__file__).parents[1] / "configs"


def resolved(env_spec=CHEETAH, backend="cpu", **settings):
  return resolve(Config(**settings), env_spec, backend)


def test_defaults_are_the_papers_setting():
  run = resolved()
  assert hash(run) == hash(resolved())
  expected = AgentConfig(obs_size=17, action_size=6)
  ours = dataclasses.replace(run.agent, plan_chunk=expected.plan_chunk)
  assert ours == expected
  assert run.num_envs == 256 and run.updates_per_step == 256
  assert run.total_steps >= 2_000_000 > run.total_steps - 256
  assert run.buffer_size == 1_000_000 and run.slots == 2000
  assert run.episode_length == 500 and run.action_repeat == 2


def test_large_action_spaces_and_hard_domains():
  run = resolved(DOG)
  assert run.agent.iterations == 8
  assert run.total_vector_steps == math.ceil(7_000_000 / 256)
  assert resolved(DOG, iterations=5).agent.iterations == 5
  assert resolved(EnvSpec("humanoid-walk", 67, 21)).agent.iterations == 8
  assert resolved(EnvSpec("hopper-hop", 15, 19)).agent.iterations == 6


@pytest.mark.parametrize(
  "size, enc, mlp, latent, layers, num_q",
  [
    (1, 256, 384, 128, 2, 2),
    (5, 256, 512, 512, 2, 5),
    (19, 1024, 1024, 768, 3, 5),
    (48, 1792, 1792, 768, 4, 5),
    (317, 4096, 4096, 1376, 5, 8),
  ],
)
def test_model_sizes(size, enc, mlp, latent, layers, num_q):
  agent = resolved(model_size=size).agent
  sizes = (
    agent.enc_dim, agent.mlp_dim, agent.latent_dim, agent.num_enc_layers, agent.num_q
  )
  assert sizes == (enc, mlp, latent, layers, num_q)
  assert resolved(model_size=size, mlp_dim=64).agent.mlp_dim == 64


def test_semantics_sets_two_items_that_can_be_set_alone():
  head = resolved(semantics="head").agent
  assert (head.entropy_form, head.q_dropout_form) == ("head", "head")
  mixed = resolved(semantics="head", q_dropout_form="paper").agent
  assert (mixed.entropy_form, mixed.q_dropout_form) == ("head", "paper")


@pytest.mark.parametrize(
  "length, expected",
  [(500, 0.99), (100, 0.95), (1000, 0.995), (5000, 0.995), (4, 0.95)],
)
def test_discount_follows_the_episode_length(length, expected):
  spec = EnvSpec("some-task", 3, 1, episode_length=length)
  (discount,) = resolved(spec, num_envs=2).agent.discounts
  assert discount == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
  "settings, vector_steps, burst",
  [
    # S = max(1000, 5T) agent steps, rounded up to whole vector steps.
    ({"num_envs": 1}, 2500, 2500),
    ({"num_envs": 256}, 10, 2500),
    # Never fewer than one full window for every environment.
    ({"num_envs": 2000}, 3, 2500),
    ({"num_envs": 2000, "horizon": 5}, 5, 2500),
    ({"num_envs": 4, "seed_steps": 10, "utd": 0.5}, 3, 5),
    # One random action more, and not before the first episodes are published.
    ({"num_envs": 1, "insertion": "episode"}, 2501, 2500),
    ({"num_envs": 256, "insertion": "episode"}, 501, 2500),
  ],
)
def test_seed_phase_and_burst(settings, vector_steps, burst):
  run = resolved(**settings)
  assert (run.seed_vector_steps, run.burst_updates) == (vector_steps, burst)


def test_short_episodes_keep_a_thousand_seed_steps():
  spec = EnvSpec("short-task", 3, 1, episode_length=100)
  assert resolved(spec, num_envs=10).seed_vector_steps == 100


def test_updates_per_vector_step():
  assert resolved(num_envs=8, utd=0.5).updates_per_step == 4
  assert resolved(num_envs=1, utd=3.0).updates_per_step == 3


def test_replay_capacity():
  assert replay_slots(None, 2_000_000, 8, 500) == 2000
  assert replay_slots(None, 20_000, 8, 500) == 40
  assert replay_slots(None, 2_000_000, 2000, 500) == 4000
  assert replay_slots(9_999, 2_000_000, 8, 500) == 19
  with pytest.raises(ConfigError, match="8000 or more"):
    replay_slots(7_999, 2_000_000, 8, 500)


def test_code_shape_follows_the_backend():
  cpu, gpu = resolved().agent, resolved(backend="gpu").agent
  assert (cpu.q_layout, gpu.q_layout) == ("list", "stacked")
  assert 1 <= cpu.plan_chunk <= 4 and gpu.plan_chunk == 0
  small = resolved(num_envs=8, mlp_dim=128, num_samples=128).agent
  assert small.plan_chunk == 0
  assert resolved(plan_chunk=3).agent.plan_chunk == 3


def test_completed_settings_are_complete_and_stay():
  config = Config(num_envs=8, model_size=1, buffer_size=100_123, semantics="head")
  done = complete(config, CHEETAH)
  assert complete(done, CHEETAH) == done
  undecided = {k for k, value in dataclasses.asdict(done).items() if value is None}
  assert undecided == {"platform", "plan_chunk", "q_layout", "reset_batch", "cache_dir"}
  for backend in ("cpu", "gpu"):
    assert resolve(done, CHEETAH, backend) == resolve(config, CHEETAH, backend)


def test_completion_gives_the_registry_name():
  assert complete(Config(task="cheetah_run"), CHEETAH).task == "cheetah-run"


@pytest.mark.parametrize(
  "settings, message",
  [
    ({"num_envs": 0}, "--num-envs must be at least 1, got 0"),
    ({"num_envs": 2.0}, "--num-envs expects an integer, got 2.0"),
    ({"utd": 0.001}, "--utd 0.001 .* no update"),
    ({"utd": -1.0}, "--utd must be at least 0.0"),
    ({"horizon": 501}, "--horizon 501 is longer than an episode"),
    ({"buffer_size": 1000}, "--buffer-size 1000 is too small .* 256000 or more"),
    ({"latent_dim": 100}, "--latent-dim 100 is not divisible by --simnorm-dim 8"),
    ({"num_elites": 513}, "--num-elites 513 is more than --num-samples 512"),
    ({"num_pi_trajs": 512}, "--num-pi-trajs 512 leaves nothing"),
    ({"model_size": 6}, "--model-size expects one of 1, 5, 19, 48, 317, got 6"),
    ({"model_size": True}, "--model-size expects one of"),
    ({"semantics": "papr"}, "Did you mean paper"),
    ({"insertion": "steps"}, "Did you mean step"),
    ({"matmul_precision": "low"}, "one of high, highest, bfloat16"),
    ({"eval_freq": -1}, "--eval-freq must be at least 0"),
    ({"log_freq": -1}, "--log-freq must be at least 0"),
    ({"checkpoint_freq": -1}, "--checkpoint-freq must be at least 0"),
    ({"eval_episodes": 0}, "--eval-episodes must be at least 1"),
    ({"total_steps": 0}, "--total-steps must be at least 1"),
    ({"batch_size": 0}, "--batch-size must be at least 1"),
    ({"num_q": 1}, "--num-q must be at least 2"),
    ({"dropout": 1.0}, "--dropout must be less than 1"),
    ({"rho": 1.5}, "--rho must be at most 1.0"),
    ({"lr": float("nan")}, "--lr expects a number, got nan"),
    ({"lr": 0.0}, "--lr must be greater than 0"),
    ({"min_std": 3.0}, "--min-std 3.0 must be less than --max-std 2.0"),
    ({"vmin": 10.0}, "--vmin 10.0 must be less than --vmax"),
    ({"discount_min": 0.999}, "--discount-min 0.999 is more than"),
    ({"reset_batch": 300}, "--reset-batch 300 is more than --num-envs 256"),
    ({"name": "a/b"}, "--name is one part of a path"),
    ({"name": ""}, "--name is one part of a path"),
    ({"seed": -1}, "--seed must be at least 0"),
  ],
)
def test_wrong_settings_are_explained(settings, message):
  with pytest.raises(ConfigError, match=message) as caught:
    resolved(**settings)
  assert "\n" not in str(caught.value)


def write(tmp_path, text):
  path = tmp_path / "preset.yaml"
  path.write_text(text)
  return path


def test_dumped_settings_are_read_back(tmp_path):
  config = complete(Config(lr=1e-5, mpc=False, platform="cpu", vmin=-7), CHEETAH)
  path = write(tmp_path, dump(config))
  assert merge(Config(), load_yaml(path)) == config


def test_numbers_in_yaml(tmp_path):
  values = load_yaml(write(tmp_path, "lr: 3e-4\nutd: 1\ntotal_steps: null\n"))
  assert values == {"lr": 3e-4, "utd": 1.0, "total_steps": None}
  assert isinstance(values["utd"], float)
  assert load_yaml(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
  "text, message",
  [
    ("num_env: 3", "unknown key 'num_env'. Did you mean num_envs"),
    ("num-envs: 3", "unknown key 'num-envs'. Did you mean num_envs"),
    ("zzzz: 3", "unknown key 'zzzz'. Valid keys: task, num_envs"),
    ("1: 3", "unknown key 1"),
    ("num_envs: many", "num_envs in .* expects an integer, got 'many'"),
    ("num_envs: 1.5", "num_envs in .* expects an integer, got 1.5"),
    ("num_envs: null", "num_envs in .* expects an integer, got None"),
    ("num_envs: true", "num_envs in .* expects an integer, got True"),
    ("mpc: 1", "mpc in .* expects true or false, got 1"),
    ("lr: fast", "lr in .* expects a number, got 'fast'"),
    ("lr: [1]", "lr in .* expects a number"),
    ("semantics: heads", "semantics in .* Did you mean head"),
    ("- task", "lines of the form `key: value`, got a list"),
    ("task: [", "line 1 is not valid YAML|line 2 is not valid YAML"),
  ],
)
def test_wrong_yaml_is_explained(tmp_path, text, message):
  with pytest.raises(ConfigError, match=message) as caught:
    load_yaml(write(tmp_path, text))
  assert "\n" not in str(caught.value)


def test_unreadable_yaml_is_explained(tmp_path):
  with pytest.raises(ConfigError, match="No such file"):
    load_yaml(tmp_path / "none.yaml")
  with pytest.raises(ConfigError, match="directory"):
    load_yaml(tmp_path)
  (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
  with pytest.raises(ConfigError, match="not UTF-8"):
    load_yaml(tmp_path / "binary.yaml")


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda p: p.name)
def test_presets_resolve(path):
  config = merge(Config(), load_yaml(path))
  assert resolve(config, EnvSpec(config.task, 5, 1), "cpu").total_vector_steps > 0


def test_settings_import_no_jax():
  code = (
    "import sys, mjx_tdmpc2.cli; "
    "sys.exit(any(m in sys.modules for m in ('jax', 'mujoco', 'dm_control')))"
  )
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
