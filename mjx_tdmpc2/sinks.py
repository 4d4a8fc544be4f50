"""Where a run's numbers go: CSV files, TensorBoard, `meta.json`, the terminal."""

import csv
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from typing import Any, TextIO

import jax
import tensorboardX

from mjx_tdmpc2.checkpoint import FORMAT_VERSION

TRAIN_COLUMNS = (
  "agent_steps",
  "env_steps",
  "updates",
  "wall_seconds",
  "agent_steps_per_second",
  "updates_per_second",
  "episode_return",
  "episodes",
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
)
EVAL_COLUMNS = (
  "agent_steps",
  "env_steps",
  "return_mean",
  "return_std",
  "return_min",
  "return_max",
  "episodes",
  "seconds",
)
_PACKAGES = (
  "mjx-tdmpc2",
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "mujoco",
  "mujoco-mjx",
  "dm-control",
  "orbax-checkpoint",
  "numpy",
)


class RunLog:
  """`metrics.csv` and `eval.csv` of a run, and the same numbers for TensorBoard.

  Every row is on disk when the call returns.
  """

  def __init__(
    self,
    run_dir: str | pathlib.Path,
    train_resume_at: int | None = None,
    eval_resume_at: int | None = None,
  ):
    """Opens the log of a run, new or resumed.

    Args:
      run_dir: the run directory.
      train_resume_at: agent steps of the last training row that the restored
        checkpoint knows of. Later rows will be made again and are dropped. None
        starts anew.
      eval_resume_at: the same for evaluations.
    """
    run_dir = pathlib.Path(run_dir)
    self._tables = {
      "train": _Table(run_dir / "metrics.csv", TRAIN_COLUMNS, train_resume_at),
      "eval": _Table(run_dir / "eval.csv", EVAL_COLUMNS, eval_resume_at),
    }
    # One folder each: what TensorBoard drops on a resume, it drops per folder.
    self._writers = {
      name: tensorboardX.SummaryWriter(
        str(run_dir / "tensorboard" / name),
        purge_step=None if resume_at is None else resume_at + 1,
      )
      for name, resume_at in (("train", train_resume_at), ("eval", eval_resume_at))
    }

  def train(self, row: dict[str, Any]) -> None:
    """Adds a row to `metrics.csv`; None is an empty cell.

    Raises:
      ValueError: a column is not in the file's header.
    """
    self._write("train", row)

  def eval(self, row: dict[str, Any]) -> None:
    """Adds a row to `eval.csv`, as `train` does."""
    self._write("eval", row)

  def close(self) -> None:
    """Closes all files."""
    for writer in self._writers.values():
      writer.close()

  def _write(self, name: str, row: dict[str, Any]) -> None:
    row = {k: None if v is None else _number(v) for k, v in row.items()}
    self._tables[name].append(row)
    writer = self._writers[name]
    for column, value in row.items():
      if value is not None and column != "agent_steps":
        writer.add_scalar(column, value, row["agent_steps"])
    writer.flush()


class _Table:
  """One CSV file whose columns are fixed by its header, the first row's keys."""

  def __init__(
    self, path: pathlib.Path, columns: tuple[str, ...], resume_at: int | None
  ):
    self._path = path
    self._columns = columns
    self._header: list[str] | None = None
    if path.exists() and path.stat().st_size:
      self._header = self._keep_until(-1 if resume_at is None else resume_at)

  def _keep_until(self, agent_steps: int) -> list[str]:
    """Drops later rows, and one that a kill cut short; returns the header."""
    with self._path.open(newline="") as file:
      header, *rows = csv.reader(file)
    at = header.index("agent_steps")
    whole = [row for row in rows if len(row) == len(header)]
    kept = [row for row in whole if int(row[at]) <= agent_steps]
    scratch = self._path.with_name(self._path.name + ".tmp")
    with scratch.open("w", newline="") as file:
      csv.writer(file).writerows([header, *kept])
      file.flush()
      os.fsync(file.fileno())
    scratch.replace(self._path)
    return header

  def append(self, row: dict[str, Any]) -> None:
    new = self._header is None
    if new:
      self._header = list(self._columns) + [c for c in row if c not in self._columns]
    unknown = [column for column in row if column not in self._header]
    if unknown:
      raise ValueError(
        f"{self._path} has no column {unknown[0]!r}; its columns were fixed by its "
        "first row."
      )
    with self._path.open("a", newline="") as file:
      writer = csv.DictWriter(file, self._header, restval="")
      if new:
        writer.writeheader()
      writer.writerow({k: "" if v is None else v for k, v in row.items()})


def _number(value: Any) -> int | float:
  """A Python number, for scalars of numpy and JAX too."""
  value = value.item() if hasattr(value, "item") else value
  return value if isinstance(value, int) else float(value)


def write_meta(run_dir: str | pathlib.Path) -> None:
  """Writes `meta.json`: what made this run. A resume keeps the earlier records.

  The file describes the latest start (versions, devices, git revision, command
  line); `earlier_starts` has those before it, oldest first.
  """
  path = pathlib.Path(run_dir) / "meta.json"
  earlier = []
  if path.exists():
    last = json.loads(path.read_text())
    earlier = [*last.pop("earlier_starts", []), last]
  devices = jax.devices()
  record = {
    "format_version": FORMAT_VERSION,
    "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    "command": sys.argv,
    "python": platform.python_version(),
    "versions": {name: package_version(name) for name in _PACKAGES},
    "git_revision": git_revision(),
    "platform": devices[0].platform,
    "device_kind": devices[0].device_kind,
    "device_count": len(devices),
    "machine": platform.platform(),
    "earlier_starts": earlier,
  }
  scratch = path.with_name(path.name + ".tmp")
  scratch.write_text(json.dumps(record, indent=2) + "\n")
  scratch.replace(path)


def package_version(name: str) -> str | None:
  """The installed version of a distribution, None where it is not installed."""
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def git_revision() -> str | None:
  """Commit of the checkout this package lies in, with `-dirty` where changed."""
  root = pathlib.Path(__file__).resolve().parents[1]
  if not (root / ".git").exists():
    return None
  describe = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--match="]
  try:
    done = subprocess.run(
      describe, cwd=root, capture_output=True, text=True, timeout=20
    )
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout.strip() or None


class Progress:
  """One line at the bottom of a terminal; now and then a plain line elsewhere."""

  # A rate forgets what is older than about this, so that it follows the machine.
  _memory_seconds = 60.0

  def __init__(self, stream: TextIO | None = None, plain_seconds: float = 30.0):
    """Writes to `stream`, stderr by default.

    Args:
      stream: a terminal gets a line that is redrawn in place.
      plain_seconds: least time between lines where `stream` is no terminal.
    """
    self._stream = stream or sys.stderr
    self._live = self._stream.isatty()
    self._interval = 0.1 if self._live else plain_seconds
    self._shown_at = -math.inf
    self._drawn = False
    self._phase = ""
    self._last_time = time.monotonic()
    self._done: dict[str, int] = {}
    self._rates: dict[str, tuple[float, float]] = {}  # Work and seconds, decayed.

  def update(
    self,
    *,
    phase: str,
    done: int,
    total: int,
    agent_steps: int,
    env_steps: int,
    episode_return: float | None = None,
  ) -> None:
    """Reports finished work.

    Args:
      phase: "seed", "burst", "train" or "eval".
      done: units of this phase done so far: agent steps in "seed" and "train",
        updates in "burst", steps of an episode in "eval".
      total: units of this phase in all.
      agent_steps: of the run.
      env_steps: of the run.
      episode_return: mean return of the episodes that ended last.
    """
    rate = self._measure(phase, done)
    now = time.monotonic()
    changed, self._phase = phase != self._phase, phase
    if not (changed or done >= total or now - self._shown_at >= self._interval):
      return
    self._shown_at = now
    line = progress_line(
      phase, done, total, agent_steps, env_steps, episode_return, rate
    )
    if self._live:
      width = shutil.get_terminal_size().columns - 1
      self._stream.write("\r" + line[:width].ljust(width))
      self._drawn = True
    else:
      self._stream.write(line + "\n")
    self._stream.flush()

  def message(self, text: str) -> None:
    """Prints lines that stay, above the progress line."""
    self._clear()
    self._stream.write(text + "\n")
    self._stream.flush()
    # What happened meanwhile (compiling, saving) is no phase's work.
    self._last_time = time.monotonic()

  def close(self) -> None:
    """Leaves the last state on the screen and ends its line."""
    if self._drawn:
      self._stream.write("\n")
      self._stream.flush()
      self._drawn = False

  def _clear(self) -> None:
    if self._drawn:
      width = shutil.get_terminal_size().columns - 1
      self._stream.write("\r" + " " * width + "\r")
      self._drawn = False

  def _measure(self, phase: str, done: int) -> float | None:
    """Units a second in this phase; the time since the last report is its own."""
    now = time.monotonic()
    seconds, self._last_time = now - self._last_time, now
    before = self._done.get(phase)
    self._done[phase] = done
    if before is None:  # A resumed run did the units before this in another life.
      return None
    fresh = done - before if done > before else done
    work, spent = self._rates.get(phase, (0.0, 0.0))
    decay = math.exp(-seconds / self._memory_seconds)
    work, spent = work * decay + fresh, spent * decay + seconds
    self._rates[phase] = (work, spent)
    return work / spent if spent else None


def progress_line(
  phase: str,
  done: int,
  total: int,
  agent_steps: int,
  env_steps: int,
  episode_return: float | None,
  rate: float | None,
) -> str:
  """The text of one progress line; arguments as in `Progress.update`."""
  cells, share = 16, min(1.0, done / max(total, 1))
  bar = "#" * int(share * cells)
  parts = [
    f"{phase:<5} [{bar:<{cells}}] {share:4.0%}",
    f"agent steps {agent_steps:,}",
    f"env steps {env_steps:,}",
    "return " + ("-" if episode_return is None else f"{episode_return:.1f}"),
  ]
  if rate:
    unit = {"burst": "updates", "eval": "episode steps"}.get(phase, "steps")
    parts.append(f"{rate:,.1f} {unit}/s" if rate < 100 else f"{rate:,.0f} {unit}/s")
    parts.append(f"{clock((total - done) / rate)} left")
  return "  ".join(parts)


def clock(seconds: float) -> str:
  """A duration as 4:05, 3:04:05 or 2d 03:04:05."""
  minutes, second = divmod(round(seconds), 60)
  hour, minute = divmod(minutes, 60)
  if hour >= 24:
    return f"{hour // 24}d {hour % 24:02}:{minute:02}:{second:02}"
  return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
