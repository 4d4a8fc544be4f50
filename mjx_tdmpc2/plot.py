"""The learning curve of a run as a picture."""

import csv
import pathlib


def learning_curve(run_dir: str | pathlib.Path) -> pathlib.Path:
  """Draws returns over env steps into `RUN_DIR/learning_curve.png`.

  Evaluations are drawn as mean with a band from the least to the largest return,
  training episodes as thin dots. The upper axis counts agent steps.

  Args:
    run_dir: a run directory with `eval.csv`, `metrics.csv` or both.

  Returns:
    The path of the picture.

  Raises:
    ValueError: neither file has a row with a return.
  """
  # Not pyplot, which would look for a display.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  run_dir = pathlib.Path(run_dir)
  train = read_columns(
    run_dir / "metrics.csv", ("env_steps", "agent_steps", "episode_return")
  )
  names = ("env_steps", "agent_steps", "return_mean", "return_min", "return_max")
  evals = read_columns(run_dir / "eval.csv", names)
  last = [table[-1] for table in (train, evals) if table]
  if not last:
    raise ValueError(f"{run_dir} holds no returns yet: there is nothing to draw.")

  figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  if train:
    steps, _, returns = zip(*train, strict=True)
    axes.plot(steps, returns, ".", ms=2.5, color="0.6", label="training episodes")
  if evals:
    steps, _, mean, low, high = zip(*evals, strict=True)
    axes.fill_between(steps, low, high, alpha=0.2, lw=0, label="evaluation, min to max")
    axes.plot(steps, mean, "o-", ms=3, label="evaluation, mean")
  axes.set(
    xlabel="env steps",
    ylabel="episode return",
    title="/".join(run_dir.absolute().parts[-3:]),
  )
  axes.set_xlim(left=0)
  axes.grid(alpha=0.3)
  axes.legend(loc="best", fontsize="small")
  env_steps, agent_steps = max(last)[:2]
  repeat = env_steps / agent_steps if agent_steps else 1.0
  upper = axes.secondary_xaxis(
    "top", functions=(lambda x: x / repeat, lambda x: x * repeat)
  )
  upper.set_xlabel("agent steps")
  path = run_dir / "learning_curve.png"
  figure.savefig(path)
  return path


def read_columns(path: pathlib.Path, names: tuple[str, ...]) -> list[tuple[float, ...]]:
  """Rows of a CSV file that have all the named cells; [] where there is no file."""
  if not path.exists():
    return []
  with path.open(newline="") as file:
    rows = list(csv.DictReader(file))
  return [
    tuple(float(row[name]) for name in names)
    for row in rows
    if all(row.get(name) for name in names)
  ]
