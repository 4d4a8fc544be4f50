"""The start-up report and the learning curve."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import struct

from envs_mjx.base import EnvSpec
from mjx_tdmpc2 import plot, report
from mjx_tdmpc2.config import resolve
from mjx_tdmpc2.settings import Config

SPEC = EnvSpec("cheetah-run", obs_size=17, action_size=6)


@struct.dataclass
class Learner:
  params: jax.Array
  optimiser: jax.Array


@struct.dataclass
class State:
  learner: Learner
  env: tuple
  replay: dict
  count: jax.Array


def state_shapes() -> State:
  """Shapes only: 8 GB of replay, 12 kB of parameters."""

  def state():
    return State(
      learner=Learner(jnp.zeros((1000, 3)), jnp.zeros((1000, 3))),
      env=(jnp.zeros((256, 17)), jax.random.split(jax.random.key(0), 4)),
      replay={"obs": jnp.zeros((2000, 1000, 1000)), "done": jnp.zeros(7, bool)},
      count=jnp.int32(0),
    )

  return jax.eval_shape(state)


def test_tree_bytes_counts_every_dtype_and_keys():
  state = state_shapes()
  assert report.tree_bytes(state.env) == 256 * 17 * 4 + 4 * 8
  assert report.tree_bytes(state.replay) == 8_000_000_000 + 7
  assert report.tree_size(state.learner) == 6000


def test_settings_are_the_resolved_ones():
  config = Config(num_envs=256, task="cheetah-run")
  resolved = resolve(config, SPEC, "cpu")
  text = "\n".join(report.settings_rows(config, resolved, 5_400_000))
  for expected in (
    "5.40 million parameters",
    "observation 17, action 6",
    "2,000,128 agent steps (4,000,256 env steps) = 7,813 vector steps of 256",
    "256 after every vector step, batch 256",
    "2,560 agent steps (10 vector steps) at random, then 2,500 updates",
    "1,000,000 transitions = 2,000 episodes of 500",
    "10 episodes every 50,000 agent steps",
    "6 iterations of 512 candidates, horizon 3",
  ):
    assert expected in text, expected
  config = Config(mpc=False, eval_freq=0)
  text = "\n".join(report.settings_rows(config, resolve(config, SPEC, "cpu"), 1))
  assert "the policy, without planning" in text
  assert "10 episodes at the end only" in text


def test_memory_is_compared_with_what_is_free():
  sizes = {"replay": 8 * 10**9, "learner": 2 * 10**8, "other": 10**6}
  fits = report.memory_rows(sizes, None, 30 * 10**9)
  assert "replay 8.00 GB, learner 0.20 GB, other 1.0 MB; in all 8.20 GB" in fits[0]
  assert "free on the host 30.00 GB" in fits[1] and len(fits) == 2
  # On the host alone the state and its copy must fit; beside a device, the copy.
  (warning,) = report.memory_rows(sizes, None, 15 * 10**9)[2:]
  assert "needs 16.40 GB of the host's memory and 15.00 GB are free" in warning
  assert len(report.memory_rows(sizes, 80 * 10**9, 15 * 10**9)) == 2
  (warning,) = report.memory_rows(sizes, 5 * 10**9, 15 * 10**9)[2:]
  assert "needs 8.20 GB of the device's memory" in warning
  assert "unknown" in report.memory_rows(sizes, None, None)[1]


def test_the_whole_report_and_the_disk_warning(tmp_path, monkeypatch):
  free = 30 * 10**9
  monkeypatch.setattr(
    report.shutil, "disk_usage", lambda path: SimpleNamespace(free=free)
  )
  config = Config(num_envs=256, task="cheetah-run", seed=4)
  resolved = resolve(config, SPEC, "cpu")
  run_dir = tmp_path / "runs/new"
  text = report.start_up(config, resolved, state_shapes(), run_dir)
  assert "cheetah-run, 256 environments, seed 4" in text
  assert str(run_dir) in text
  assert not (tmp_path / "runs").exists()
  assert f"jax {jax.__version__}" in text
  assert "checkpoints up to 24.00 GB, free 30.00 GB" in text
  assert "warning: the checkpoints" not in text
  free = 20 * 10**9
  text = report.start_up(config, resolved, state_shapes(), run_dir)
  assert "warning: the checkpoints may need 24.00 GB and only 20.00 GB" in text


def test_timed_says_what_starts_and_how_long_it_took():
  said = []
  with report.timed("compiling the update", said.append):
    assert said == ["compiling the update ..."]
  assert said[1].startswith("compiling the update: ") and said[1].endswith(" s")


def test_learning_curve_is_drawn_from_both_files(tmp_path):
  with pytest.raises(ValueError, match="no returns yet"):
    plot.learning_curve(tmp_path)
  (tmp_path / "metrics.csv").write_text(
    "agent_steps,env_steps,episode_return\n500,1000,\n1000,2000,30.5\n"
  )
  names = ("env_steps", "agent_steps", "episode_return")
  assert plot.read_columns(tmp_path / "metrics.csv", names) == [(2000, 1000, 30.5)]
  picture = plot.learning_curve(tmp_path)
  only_training = picture.read_bytes()
  assert picture == tmp_path / "learning_curve.png"
  assert only_training[:4] == b"\x89PNG"
  (tmp_path / "eval.csv").write_text(
    "agent_steps,env_steps,return_mean,return_std,return_min,return_max\n"
    "0,0,10,1,9,11\n1000,2000,40,3,30,50\n"
  )
  assert plot.learning_curve(tmp_path).read_bytes() != only_training
