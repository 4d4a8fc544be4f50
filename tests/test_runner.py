"""Whole runs in a directory: files, stopping, resuming, diverging."""

import csv
import json

import jax
import numpy as np
import pytest

from mjx_tdmpc2 import runner
from mjx_tdmpc2.config import Config, complete
from mjx_tdmpc2.schedule import StopSignal
from tests.probes import CountingEnv
from tests.test_training import assert_equal

pytestmark = pytest.mark.slow

# 2 environments, episodes of 6: seed phase 4 vector steps, a burst of 8 updates.
SETTINGS = Config(
  num_envs=2,
  total_steps=32,
  seed_steps=8,
  buffer_size=48,
  eval_freq=12,
  eval_episodes=2,
  checkpoint_freq=10,
  log_freq=6,
  matmul_precision="highest",
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
NUMBERS = (
  "consistency_loss",
  "reward_loss",
  "value_loss",
  "pi_loss",
  "total_loss",
  "grad_norm",
  "pi_grad_norm",
  "pi_scale",
  "bad_env_resets",
  "contact_overflow",
  "wall_seconds",
  "agent_steps_per_second",
  "updates_per_second",
)
TIMES = ("wall_seconds", "agent_steps_per_second", "updates_per_second", "seconds")


class StopAfter(StopSignal):
  """Behaves as if SIGINT came when the loop looks for the n-th time."""

  def __init__(self, looks: int):
    self.looks = looks

  @property
  def name(self):
    self.looks -= 1
    return "SIGINT" if self.looks < 0 else None


PROGRAMS = ("_train_chunk", "_eval_init", "_eval_run")
compiled = {}
compile_programs = runner.Run._compile


def compile_once(job, *args):
  """Compiles for the first run of a kind and lets later ones use its programs."""
  if job.resolved.agent in compiled:
    vars(job).update(compiled[job.resolved.agent])
    if job.state is None:
      job.state = job.trainer.init(job.key)
    return
  compile_programs(job, *args)
  compiled[job.resolved.agent] = {name: getattr(job, name) for name in PROGRAMS}


@pytest.fixture(autouse=True, scope="module")
def small_world():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(runner.envs_mjx, "make", lambda task: CountingEnv())
    patch.setattr(runner.Run, "_compile", compile_once)
    yield


def settings(**changes):
  return complete(
    Config(**(vars(SETTINGS) | changes)), CountingEnv().spec
  )


def drive(run_dir, resume=False, looks=10_000, **changes):
  """One session of a run; returns the job after it has saved and closed."""
  run_dir.mkdir(exist_ok=True)
  job = runner.Run(settings(**changes), run_dir, resume)
  job.start(StopSignal())
  for pace in job.pace.values():
    pace.units = lambda limit: min(limit, 3)
  stop = StopAfter(looks)
  job.loop(stop)
  job.finish()
  job.close()
  return job


def rows(path, drop=TIMES):
  with path.open(newline="") as file:
    return [
      {k: v for k, v in row.items() if k not in drop} for row in csv.DictReader(file)
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
  """A run that was never stopped."""
  return drive(tmp_path_factory.mktemp("straight"))


def test_a_run_writes_what_it_should(straight):
  metrics = rows(straight.run_dir / "metrics.csv", drop=())
  assert [int(row["agent_steps"]) for row in metrics] == [6, 12, 18, 24, 30, 32]
  last = metrics[-1]
  assert int(last["env_steps"]) == 64
  assert int(last["updates"]) == 8 + 12 * 2
  for name in NUMBERS:
    assert np.isfinite(float(last[name])), name
  assert metrics[0]["total_loss"] == "", "no update had been made"
  # Episodes of 6 steps end at agent steps 12 and 24, two at a time.
  assert [row["episodes"] for row in metrics] == ["", "2", "", "2", "", ""]
  assert [bool(row["episode_return"]) for row in metrics] == [
    row["episodes"] == "2" for row in metrics
  ]
  evals = rows(straight.run_dir / "eval.csv", drop=())
  assert [int(row["agent_steps"]) for row in evals] == [0, 12, 24, 32]
  assert all(row["episodes"] == "2" for row in evals)
  kept = sorted(int(p.name) for p in (straight.run_dir / "checkpoints").iterdir())
  assert len(kept) == 2
  meta = json.loads((straight.run_dir / "meta.json").read_text())
  assert meta["versions"]["jax"] == jax.__version__
  assert list((straight.run_dir / "tensorboard").rglob("events*"))


@pytest.mark.parametrize(
  "looks", [1, 5, 14], ids=lambda n: f"stopped-at-look-{n}"
)
def test_resumed_run_equals_a_straight_one(straight, tmp_path, looks):
  first = drive(tmp_path, looks=looks)
  assert not first.finished
  second = drive(tmp_path, resume=True)
  assert second.finished
  assert_equal(straight.state, second.state)
  for name in ("metrics.csv", "eval.csv"):
    assert rows(tmp_path / name) == rows(straight.run_dir / name)


def test_stops_inside_the_burst(tmp_path):
  for looks in range(4, 9):
    job = drive(tmp_path / str(looks), looks=looks)
    if 0 < job.updates < 8:
      assert job.vector_steps == 4
      return
  raise AssertionError("the stops above include one inside the burst")


def test_a_finished_run_resumes_to_nothing_and_can_be_prolonged(straight, tmp_path):
  drive(tmp_path, total_steps=20)
  again = drive(tmp_path, resume=True, total_steps=20)
  assert again.finished and again.vector_steps == 10
  longer = drive(tmp_path, resume=True)
  assert_equal(straight.state.learner, longer.state.learner)


def test_diverged_losses_end_the_run_without_saving(tmp_path, capsys):
  config = settings(lr=1e20)
  code = runner.run(config, tmp_path, resume=False)
  assert code == 1
  error = capsys.readouterr().err
  assert "the losses became" in error and "Traceback" not in error


def test_run_reports_its_end_and_draws_the_curve(tmp_path, capsys):
  code = runner.run(settings(total_steps=12), tmp_path, resume=False)
  assert code == 0
  assert "is finished" in capsys.readouterr().out
  assert (tmp_path / "learning_curve.png").stat().st_size > 1000
  code = runner.run(settings(total_steps=12), tmp_path, resume=True)
  assert code == 0
  assert "already finished" in capsys.readouterr().out
