"""The command line: what it accepts, what it refuses and how, and run directories."""

import os
import pathlib
import subprocess
import sys

import pytest

from envs_mjx.base import EnvSpec
from mjx_tdmpc2 import cli
from mjx_tdmpc2.config import Config, ConfigError, complete
from mjx_tdmpc2.config_file import load_yaml

ROOT = pathlib.Path(__file__).parents[1]
CHEETAH = EnvSpec("cheetah-run", obs_size=17, action_size=6)


@pytest.fixture
def trained(monkeypatch, tmp_path):
  """Runs in an empty directory, without JAX and environments; lists the runs."""
  runs = []
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(cli, "_set_up_jax", lambda config: None)
  monkeypatch.setattr(cli, "_env_spec", lambda task: CHEETAH)
  monkeypatch.setattr(
    cli, "_train", lambda config, run_dir: runs.append((config, run_dir)) or 0
  )
  return runs


def config_of(*argv):
  return cli.parse(list(argv)).config


def error_of(capsys, *argv):
  """Runs a command line that is wrong and returns its one sentence."""
  assert cli.main(list(argv)) == 2
  captured = capsys.readouterr()
  assert captured.out == ""
  message = captured.err.rstrip("\n")
  assert message.startswith("error: ") and "\n" not in message
  return message


# Flags.


def test_flags_of_every_type():
  config = config_of(
    "--num-envs", "8", "--task=walker-run", "--utd", "0.5", "--no-mpc", "--stagger",
    "--total-steps", "None", "--seed-steps", "1_000", "--platform", "cpu",
    "--lr", "1e-4", "--vmin", "-7", "--model-size", "19",
  )
  assert config == Config(
    num_envs=8, task="walker-run", utd=0.5, mpc=False, stagger=True, seed_steps=1000,
    platform="cpu", lr=1e-4, vmin=-7.0, model_size=19,
  )
  assert config_of() == Config()
  assert config_of("--no-mpc", "--mpc", "--seed", "1", "--seed", "2") == Config(seed=2)


def test_flags_win_over_the_preset_and_the_preset_over_defaults(tmp_path):
  preset = tmp_path / "preset.yaml"
  preset.write_text("num_envs: 8\nmpc: false\nmodel_size: 1\nbatch_size: 32\n")
  config = config_of("--config", str(preset), "--num-envs", "4", "--mpc")
  assert config == Config(num_envs=4, model_size=1, batch_size=32)


@pytest.mark.parametrize(
  "argv, message",
  [
    (["--num-env", "3"], "Unknown flag --num-env. Did you mean --num-envs"),
    (["--num_envs", "3"], "Unknown flag --num_envs. Did you mean --num-envs"),
    (["--tas", "x"], "Unknown flag --tas. Did you mean --task"),
    (["--no-mcp"], "Unknown flag --no-mcp. Did you mean --no-mpc"),
    (["--no-list-tasks"], "Unknown flag --no-list-tasks"),
    (["--xyzzy"], "Unknown flag --xyzzy. See --help"),
    (["-n", "3"], "Unknown flag -n"),
    (["cheetah-run"], "Unexpected argument 'cheetah-run'"),
    (["--mpc", "True"], "Unexpected argument 'True'"),
    (["--mpc=True"], "--mpc takes no value, got 'True'"),
    (["--num-envs"], "--num-envs needs a value: an integer"),
    (["--num-envs", "--seed", "1"], "--num-envs needs a value"),
    (["--num-envs", "1.5"], "--num-envs expects an integer, got '1.5'"),
    (["--num-envs", "None"], "--num-envs expects an integer, got 'None'"),
    (["--total-steps", "1e6"], "--total-steps expects an integer or none, got '1e6'"),
    (["--lr", "fast"], "--lr expects a number, got 'fast'"),
    (["--semantics", "heads"], "--semantics expects one of paper, head, got 'heads'"),
    (["--model-size", "7"], "--model-size expects one of 1, 5, 19, 48, 317, got '7'"),
    (["--config", "none.yaml"], "Cannot read the settings in none.yaml: No such file"),
    (["--num-envs", "0"], "--num-envs must be at least 1, got 0"),
    (["--buffer-size", "9"], "--buffer-size 9 is too small"),
    (["--horizon", "501"], "--horizon 501 is longer than an episode"),
    (["--lr", "nan"], "--lr expects a number, got nan"),
    (["--resume", "a", "--run-dir", "b"], "leave out --run-dir"),
    (["--resume", "a", "--resume-or-start"], "leave out --resume-or-start"),
  ],
)
def test_mistakes_get_one_sentence_and_touch_nothing(
  trained, tmp_path, capsys, argv, message
):
  assert message in error_of(capsys, *argv)
  assert list(tmp_path.iterdir()) == [] and trained == []


def test_every_setting_is_a_flag_and_helped(capsys):
  with pytest.raises(SystemExit) as stop:
    cli.parse(["--help"])
  assert stop.value.code == 0
  text = capsys.readouterr().out
  for name in (*Config.__dataclass_fields__, *cli.Command.__dataclass_fields__):
    assert cli.flag(name) in text


# Run directories.


def test_a_new_run_gets_its_directory_and_records_all_settings(trained):
  assert cli.main(["--num-envs", "4", "--name", "first", "--seed", "7"]) == 0
  ((config, run_dir),) = trained
  assert run_dir == pathlib.Path("runs/cheetah-run/first/seed7")
  assert config == complete(Config(num_envs=4, name="first", seed=7), CHEETAH)
  assert Config(**load_yaml(run_dir / "config.yaml")) == config
  assert cli.main(["--run-dir", "elsewhere/x"]) == 0
  assert trained[1][1] == pathlib.Path("elsewhere/x")
  assert (trained[1][1] / "config.yaml").is_file()


def test_an_empty_directory_is_taken_and_others_are_not(trained, tmp_path, capsys):
  (tmp_path / "empty").mkdir()
  assert cli.main(["--run-dir", "empty"]) == 0
  before = (tmp_path / "empty" / "config.yaml").read_bytes()
  message = error_of(capsys, "--run-dir", "empty", "--num-envs", "4")
  assert "--resume empty" in message
  assert (tmp_path / "empty" / "config.yaml").read_bytes() == before
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "thesis.tex").write_text("x")
  assert "is not empty and holds no run" in error_of(capsys, "--run-dir", "full")
  assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]
  assert len(trained) == 1


def test_a_directory_that_cannot_be_made_is_explained(trained, tmp_path, capsys):
  (tmp_path / "file").write_text("x")
  for where in ("file", "file/below"):
    message = error_of(capsys, "--run-dir", where)
    assert f"Cannot make the run directory {where}" in message
  assert trained == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_is_explained(trained, tmp_path, capsys):
  (tmp_path / "locked").mkdir(mode=0o500)
  assert "Permission denied" in error_of(capsys, "--run-dir", "locked/run")
  assert "Permission denied" in error_of(capsys, "--run-dir", "locked")


# Resuming.


@pytest.fixture
def run_dir(trained, tmp_path):
  """A directory in which a run with four environments was started."""
  assert cli.main(["--run-dir", "run", "--num-envs", "4", "--total-steps", "9000"]) == 0
  trained.clear()
  return pathlib.Path("run")


def test_resume_uses_the_recorded_settings(trained, run_dir):
  recorded = Config(**load_yaml(run_dir / "config.yaml"))
  assert cli.main(["--resume", "run"]) == 0
  assert trained == [(recorded, run_dir)]


def test_resume_may_change_some_settings_and_records_them(trained, run_dir):
  recorded = Config(**load_yaml(run_dir / "config.yaml"))
  flags = ["--total-steps", "20000", "--eval-freq", "7", "--log-freq", "8"]
  flags += ["--checkpoint-freq", "9", "--platform", "cpu"]
  assert cli.main(["--resume", "run", *flags]) == 0
  ((config, _),) = trained
  assert (config.total_steps, config.eval_freq, config.log_freq) == (20000, 7, 8)
  assert (config.checkpoint_freq, config.platform) == (9, "cpu")
  # The buffer keeps the size that it had.
  assert config.buffer_size == recorded.buffer_size == 9000
  assert Config(**load_yaml(run_dir / "config.yaml")) == config


def test_resume_accepts_what_the_run_has_anyway(trained, run_dir):
  flags = ["--num-envs", "4", "--task", "cheetah_run", "--latent-dim", "512"]
  flags += ["--seed-steps", "None"]
  assert cli.main(["--resume", "run", *flags]) == 0
  assert trained[0][0].num_envs == 4


def test_resume_names_the_fields_that_conflict(trained, run_dir, tmp_path, capsys):
  before = (run_dir / "config.yaml").read_bytes()
  preset = tmp_path / "preset.yaml"
  preset.write_text("batch_size: 32\nlog_freq: 5\n")
  message = error_of(
    capsys, "--resume", "run", "--num-envs", "8", "--no-mpc", "--config", str(preset)
  )
  assert "--num-envs (the run has 4, got 8)" in message
  assert "--mpc (the run has True, got False)" in message
  assert "--batch-size (the run has 256, got 32)" in message
  assert "--log-freq (" not in message
  assert (run_dir / "config.yaml").read_bytes() == before and trained == []


def test_resume_of_no_run_is_explained(trained, tmp_path, capsys):
  assert "it is no directory" in error_of(capsys, "--resume", "nowhere")
  (tmp_path / "other").mkdir()
  assert "it has no config.yaml" in error_of(capsys, "--resume", "other")
  (tmp_path / "other" / "config.yaml").write_text("layers: 3\n")
  assert "unknown key 'layers'" in error_of(capsys, "--resume", "other")
  assert trained == []


def test_resume_or_start_does_either(trained, tmp_path, capsys):
  preset = tmp_path / "preset.yaml"
  preset.write_text("task: cheetah_run\nnum_envs: 4\ntotal_steps: 9000\n")
  argv = ["--resume-or-start", "--config", str(preset)]
  for more in ([], [], ["--total-steps", "10000"]):
    assert cli.main([*argv, *more]) == 0
  assert {run_dir for _, run_dir in trained} == {
    pathlib.Path("runs/cheetah-run/default/seed1")
  }
  assert trained[0] == trained[1] and trained[2][0].total_steps == 10000
  preset.write_text("num_envs: 8\n")
  assert "--num-envs (the run has 4, got 8)" in error_of(capsys, *argv)


def test_only_settings_that_change_no_result_may_change_on_resume():
  assert set(Config.__dataclass_fields__) >= cli.RESUMABLE
  assert not cli.RESUMABLE & {"seed", "num_envs", "utd", "seed_steps", "buffer_size"}


# As a program.


def run_program(*argv, cwd=ROOT):
  return subprocess.run(
    [sys.executable, str(ROOT / "train.py"), *argv],
    cwd=cwd, capture_output=True, text=True, check=False,
  )


def test_version_and_mistakes_as_a_program(tmp_path):
  done = run_program("--version", cwd=tmp_path)
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout.startswith("mjx-tdmpc2 ")
  wrong = run_program("--num-env", "3", cwd=tmp_path)
  assert (wrong.returncode, wrong.stdout) == (2, "")
  assert wrong.stderr.count("\n") == 1 and "--num-envs" in wrong.stderr
  assert list(tmp_path.iterdir()) == []


def test_a_platform_that_is_not_there_is_explained(tmp_path):
  wrong = run_program("--platform", "tpu", cwd=tmp_path)
  assert (wrong.returncode, wrong.stdout) == (2, "")
  assert "--platform tpu" in wrong.stderr and "Traceback" not in wrong.stderr
  assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_print_config_is_yaml_that_gives_the_same_run(tmp_path):
  argv = ["--print-config", "--task", "pendulum_swingup", "--num-envs", "4"]
  first = run_program(*argv, cwd=tmp_path)
  assert first.returncode == 0, first.stderr
  assert "# updates_per_step: 4" in first.stdout
  preset = tmp_path / "preset.yaml"
  preset.write_text(first.stdout)
  assert load_yaml(preset)["task"] == "pendulum-swingup"
  second = run_program("--print-config", "--config", str(preset), cwd=tmp_path)
  assert second.stdout == first.stdout
  assert [p.name for p in tmp_path.iterdir()] == ["preset.yaml"]


@pytest.mark.slow
def test_tasks_and_an_unknown_task(capsys):
  assert cli.main(["--list-tasks"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split() == ["task", "observation", "action", "model"]
  assert ["pendulum-swingup", "3", "1", "1", "bodies"] in [x.split() for x in lines]
  # The paper's tasks come first.
  rows = [line.split()[0] for line in lines]
  assert rows.index("walker-walk") < rows.index("acrobot-swingup-sparse")
  with pytest.raises(ConfigError, match="Did you mean pendulum-swingup"):
    cli._env_spec("pendulum-swingp")
