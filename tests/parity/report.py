"""Writes docs/env-parity.md: how far one agent step is from recordings, task by task.

    python -m tests.parity.report --golden-dir DIR --out docs/env-parity.md

Speed is that of `control_step` for a batch of 64 on this machine, in physics steps a
second: compare rows of one table only.
"""

import argparse
import pathlib
import time

import jax
import numpy as np

import envs_mjx
from tests.parity import golden, test_envs

_HEAD = """# Environments against C MuJoCo

Made by `python -m tests.parity.report --golden-dir DIR`. Each row compares one agent
step (two control steps) from every recorded state with what dm_control on C MuJoCo did:
the largest error over the entries of the observation, relative to 1 + its value, and
the error of the reward. Left: median; then nine in ten; then the worst step.

Columns of the model: physics steps in a control step, contact slots of each contact
dimension (a dash where every possible contact has one), solver iterations and
line-search steps. Speed: physics steps a second for a batch of 64 on two CPU cores, one
task after the other in one run.

| task | steps | observation | reward | substeps | slots | solver | speed |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--golden-dir", required=True)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--task", nargs="*", help="only these")
  args = parser.parse_args()
  rows = []
  for path in golden.files(args.golden_dir, "envs"):
    if path.stem in envs_mjx.ALL_TASKS and (not args.task or path.stem in args.task):
      rows.append(_row(test_envs.Recording(path)))
      print(rows[-1], flush=True)
  args.out.write_text(_HEAD + "\n".join(rows) + "\n")


def _row(recording) -> str:
  physics = recording.physics
  ctrl, params = np.float32(recording["step/ctrl"]), recording.params("step")
  control_step = test_envs._control_step(physics)
  start = recording.states("step", "0")
  middle, _ = test_envs._in_chunks(control_step, start, ctrl)
  end, _ = test_envs._in_chunks(control_step, middle, ctrl)
  _, first = test_envs._evaluate(recording, middle, ctrl, params)
  obs, second = test_envs._evaluate(recording, end, ctrl, params)
  expected = recording["step/obs1"]
  obs_error = np.max(np.abs(obs - expected) / (1 + np.abs(expected)), axis=1)
  reward_error = np.abs(first + second - recording["step/reward"])
  slots = "/".join(str(s.stop - s.start) for s in physics.capped_slots) or "-"
  option = physics.stepped.opt
  return (
    f"| {recording.name} | {len(obs)} | {_quantiles(obs_error)} |"
    f" {_quantiles(reward_error)} | {physics.n_substeps} | {slots} |"
    f" {option.iterations}/{option.ls_iterations} |"
    f" {_speed(control_step, start, ctrl) * physics.n_substeps:,.0f} |"
  )


def _quantiles(error) -> str:
  return " / ".join(f"{np.quantile(error, q):.0e}" for q in (0.5, 0.9, 1.0))


def _speed(control_step, start, ctrl) -> float:
  """Control steps a second, the best of five calls."""
  index = np.arange(test_envs._CHUNK) % len(ctrl)
  state, ctrl = jax.device_put(jax.tree.map(lambda x: x[index], (start, ctrl)))
  seconds = []
  for _ in range(5):
    begin = time.perf_counter()
    jax.block_until_ready(control_step(state, ctrl))
    seconds.append(time.perf_counter() - begin)
  return test_envs._CHUNK / min(seconds)


if __name__ == "__main__":
  main()
