"""CSV files, TensorBoard, meta.json and the progress line."""

import csv
import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from mjx_tdmpc2 import sinks
from mjx_tdmpc2.sinks import EVAL_COLUMNS, TRAIN_COLUMNS, Progress, RunLog


def rows_of(path):
  with path.open(newline="") as file:
    return list(csv.DictReader(file))


def train_row(steps, **more):
  return {"agent_steps": steps, "env_steps": 2 * steps, "updates": steps, **more}


def test_rows_are_on_disk_at_once_with_the_promised_columns(tmp_path):
  log = RunLog(tmp_path)
  log.train(train_row(10, episode_return=None, value_loss=np.float32(0.5), extra=1))
  log.train(train_row(20, episode_return=jnp.float32(3.5), value_loss=math.nan))
  log.eval({"agent_steps": 10, "env_steps": 20, "return_mean": 7.25, "episodes": 10})
  rows = rows_of(tmp_path / "metrics.csv")
  assert list(rows[0]) == [*TRAIN_COLUMNS, "extra"]
  assert rows[0]["episode_return"] == "" and rows[0]["value_loss"] == "0.5"
  assert rows[1]["episode_return"] == "3.5" and rows[1]["value_loss"] == "nan"
  assert rows[1]["extra"] == "" and rows[1]["agent_steps"] == "20"
  (evaluation,) = rows_of(tmp_path / "eval.csv")
  assert list(evaluation) == list(EVAL_COLUMNS)
  assert evaluation["return_mean"] == "7.25" and evaluation["seconds"] == ""
  log.close()


def test_a_column_outside_the_header_is_refused(tmp_path):
  log = RunLog(tmp_path)
  log.train(train_row(1))
  with pytest.raises(ValueError, match="no column 'surprise'"):
    log.train(train_row(2, surprise=1))
  log.close()


def test_a_resume_drops_what_will_be_made_again(tmp_path):
  log = RunLog(tmp_path)
  for steps in (10, 20, 30):
    log.train(train_row(steps))
  for steps in (0, 20):
    log.eval({"agent_steps": steps})
  log.close()
  with (tmp_path / "metrics.csv").open("a") as file:
    file.write("40,80,4")  # Cut short by a kill.
  log = RunLog(tmp_path, train_resume_at=20, eval_resume_at=0)
  log.train(train_row(30, episode_return=1))
  log.eval({"agent_steps": 20, "return_mean": 5})
  log.close()
  train, evaluation = rows_of(tmp_path / "metrics.csv"), rows_of(tmp_path / "eval.csv")
  assert [r["agent_steps"] for r in train] == ["10", "20", "30"]
  assert train[-1]["episode_return"] == "1"
  assert [(r["agent_steps"], r["return_mean"]) for r in evaluation] == [
    ("0", ""),
    ("20", "5"),
  ]


def test_a_resume_before_the_first_evaluation_keeps_the_header_only(tmp_path):
  log = RunLog(tmp_path)
  log.eval({"agent_steps": 0})
  log.close()
  log = RunLog(tmp_path, train_resume_at=0, eval_resume_at=-1)
  assert rows_of(tmp_path / "eval.csv") == []
  log.eval({"agent_steps": 0, "return_mean": 2})
  log.close()
  assert [r["return_mean"] for r in rows_of(tmp_path / "eval.csv")] == ["2"]


def tensorboard_events(folder):
  """All events of a folder, oldest file first."""
  events = []
  for path in sorted(folder.iterdir()):
    data, at = path.read_bytes(), 0
    while at < len(data):  # Records: length u64, its CRC u32, payload, CRC u32.
      length = int.from_bytes(data[at : at + 8], "little")
      events.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + length]))
      at += 16 + length
  return events


def test_tensorboard_has_the_same_numbers_and_forgets_dropped_ones(tmp_path):
  log = RunLog(tmp_path)
  log.train(train_row(10, value_loss=0.25, episode_return=None))
  log.train(train_row(20, value_loss=0.75))
  log.close()
  events = tensorboard_events(tmp_path / "tensorboard/train")
  scalars = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
  assert scalars[10, "value_loss"] == 0.25 and scalars[20, "value_loss"] == 0.75
  assert scalars[20, "env_steps"] == 40
  assert (10, "episode_return") not in scalars
  RunLog(tmp_path, train_resume_at=10, eval_resume_at=-1).close()
  events = tensorboard_events(tmp_path / "tensorboard/train")
  restarts = [e.step for e in events if e.HasField("session_log")]
  assert restarts == [11]  # TensorBoard drops what has this step or a later one.


def test_meta_describes_every_start(tmp_path, monkeypatch):
  monkeypatch.setattr(sinks.sys, "argv", ["train.py", "--seed", "3"])
  sinks.write_meta(tmp_path)
  first = json.loads((tmp_path / "meta.json").read_text())
  assert first["command"] == ["train.py", "--seed", "3"]
  assert first["versions"]["jax"] and first["versions"]["mujoco-mjx"]
  assert first["device_count"] >= 1 and first["device_kind"] and first["platform"]
  assert first["format_version"] == sinks.FORMAT_VERSION
  assert first["earlier_starts"] == []
  monkeypatch.setattr(sinks.sys, "argv", ["train.py", "--resume", "x"])
  sinks.write_meta(tmp_path)
  sinks.write_meta(tmp_path)
  third = json.loads((tmp_path / "meta.json").read_text())
  earlier = third.pop("earlier_starts")
  assert [e["command"][1] for e in earlier] == ["--seed", "--resume"]
  assert earlier[0]["started"] == first["started"]
  assert [p.name for p in tmp_path.iterdir()] == ["meta.json"]


class Clock:
  """Stands in for the time module."""

  def __init__(self):
    self.now = 100.0

  def monotonic(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(sinks, "time", clock)
  return clock


class Terminal(io.StringIO):
  def isatty(self):
    return True


def report(progress, phase, done, total, **more):
  progress.update(
    phase=phase, done=done, total=total, agent_steps=done, env_steps=2 * done, **more
  )


def test_outside_a_terminal_lines_are_plain_and_rare(clock):
  stream = io.StringIO()
  progress = Progress(stream, plain_seconds=30)
  for i in range(100):
    clock.now += 1
    report(progress, "train", 10 * (i + 1), 2000, episode_return=12.34)
  lines = stream.getvalue().splitlines()
  assert len(lines) == 4 and "\r" not in stream.getvalue()
  assert "agent steps 910" in lines[-1] and "env steps 1,820" in lines[-1]
  assert "return 12.3" in lines[-1] and "10.0 steps/s" in lines[-1]
  assert "1:49 left" in lines[-1]


def test_the_end_of_a_phase_and_a_new_phase_are_always_shown(clock):
  stream = io.StringIO()
  progress = Progress(stream)
  for phase, done in (("seed", 5), ("seed", 10), ("burst", 1), ("burst", 10)):
    clock.now += 0.01
    report(progress, phase, done, 10)
  shown = [line.split()[0] for line in stream.getvalue().splitlines()]
  assert shown == ["seed", "seed", "burst", "burst"]


def test_a_terminal_gets_one_line_and_messages_above_it(clock, monkeypatch):
  monkeypatch.setenv("COLUMNS", "60")
  stream = Terminal()
  progress = Progress(stream)
  report(progress, "train", 5, 10)
  clock.now += 1
  report(progress, "train", 6, 10)
  progress.message("saved")
  progress.close()
  text = stream.getvalue()
  drawn = [part for part in text.split("\r") if part.startswith("train")]
  assert len(drawn) == 2 and all(len(part) == 59 for part in drawn)
  assert text.endswith("saved\n") and text.count("\n") == 1


def test_the_rate_of_a_phase_ignores_evaluation_and_earlier_sessions(clock):
  stream = io.StringIO()
  progress = Progress(stream, plain_seconds=0)
  report(progress, "train", 5000, 10_000)  # Resumed: no rate yet.
  assert "left" not in stream.getvalue()
  clock.now += 2
  report(progress, "train", 5100, 10_000)
  clock.now += 500
  report(progress, "eval", 250, 500)
  clock.now += 2
  report(progress, "train", 5200, 10_000)
  line = stream.getvalue().splitlines()[-1]
  assert "50.0 steps/s" in line and "1:36 left" in line


def test_an_evaluation_that_starts_again_counts_from_zero(clock):
  progress = Progress(io.StringIO(), plain_seconds=0)
  for done in (10, 20, 5):
    clock.now += 1
    rate = progress._measure("eval", done)
  assert rate == pytest.approx(7.5, rel=0.05)


def test_durations():
  assert sinks.clock(65) == "1:05"
  assert sinks.clock(3 * 3600 + 62) == "3:01:02"
  assert sinks.clock(50 * 3600 + 5) == "2d 02:00:05"
