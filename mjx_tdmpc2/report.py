"""The start-up report: what will run, on what, and whether it fits."""

import contextlib
import math
import os
import pathlib
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from mjx_tdmpc2 import __version__
from mjx_tdmpc2.config import Resolved
from mjx_tdmpc2.settings import Config
from mjx_tdmpc2.sinks import package_version

GB = 1e9
_CHECKPOINTS_ON_DISK = 3  # The two that are kept, and the one being written.


def start_up(
  config: Config, resolved: Resolved, state: Any, run_dir: str | pathlib.Path
) -> str:
  """The whole report, several lines.

  Args:
    config: the settings as given.
    resolved: the numbers that follow from them.
    state: the training state or its shapes (`jax.eval_shape`).
    run_dir: the run directory; it need not exist.
  """
  sizes = {
    "replay": tree_bytes(state.replay),
    "learner": tree_bytes(state.learner),
    "environments": tree_bytes(state.env),
  }
  total = tree_bytes(state)
  sizes["other"] = total - sum(sizes.values())
  # A checkpoint holds the state, and the learner once more by itself.
  disk = _CHECKPOINTS_ON_DISK * (total + sizes["learner"])
  free_disk = shutil.disk_usage(existing_parent(pathlib.Path(run_dir))).free
  lines = [
    f"mjx-tdmpc2 {__version__}: {resolved.task}, {resolved.num_envs} environments, "
    f"seed {config.seed}",
    row("run directory", str(run_dir)),
    row("device", device_text(jax.devices())),
    row("versions", versions_text()),
    *settings_rows(config, resolved, tree_size(state.learner.params)),
    *memory_rows(sizes, device_memory(), free_memory()),
    row("disk", f"checkpoints up to {gb(disk)}, free {gb(free_disk)}"),
  ]
  if disk > free_disk:
    lines.append(
      f"warning: the checkpoints may need {gb(disk)} and only {gb(free_disk)} are free "
      "on the run directory's disk; free some, or give a smaller --buffer-size."
    )
  return "\n".join(lines)


def settings_rows(config: Config, resolved: Resolved, params: int) -> list[str]:
  """The resolved settings.

  Args:
    config: the settings as given.
    resolved: the numbers that follow from them.
    params: count of parameters.
  """
  agent, n, r = resolved.agent, resolved.num_envs, resolved
  if agent.mpc:
    actor = (
      f"planning: {agent.iterations} iterations of {agent.num_samples} candidates, "
      f"horizon {agent.horizon}, {agent.plan_chunk or n} environments at a time"
    )
  else:
    actor = "the policy, without planning"
  return [
    row(
      "agent",
      f"model size {config.model_size}, {params / 1e6:.2f} million parameters, "
      f"observation {agent.obs_size}, action {agent.action_size}, "
      f"semantics {config.semantics}, networks at {r.matmul_precision} precision",
    ),
    row("actor", actor),
    row(
      "run",
      f"{r.total_steps:,} agent steps ({r.total_steps * r.action_repeat:,} env "
      f"steps) = {r.total_vector_steps:,} vector steps of {n}",
    ),
    row(
      "updates",
      f"{r.updates_per_step:,} after every vector step, batch {agent.batch_size}",
    ),
    row(
      "seed phase",
      f"{r.seed_vector_steps * n:,} agent steps ({r.seed_vector_steps:,} vector "
      f"steps) at random, then {r.burst_updates:,} updates at once",
    ),
    row(
      "replay",
      f"{r.buffer_size:,} transitions = {r.slots:,} episodes of {r.episode_length}, "
      f"insertion by {r.insertion}",
    ),
    row(
      "evaluation",
      f"{r.eval_episodes} episodes {every(config.eval_freq)}; "
      f"checkpoint {every(config.checkpoint_freq)}; "
      f"log row {every(config.log_freq)}",
    ),
  ]


def memory_rows(
  sizes: dict[str, int], device_free: int | None, host_free: int | None
) -> list[str]:
  """What the state needs beside what is free, and a warning where it won't fit.

  Args:
    sizes: bytes of each part of the state.
    device_free: free bytes of the accelerator; None where the host computes.
    host_free: free bytes of the host; None where that is unknown.
  """
  total = sum(sizes.values())
  parts = ", ".join(f"{name} {gb(size)}" for name, size in sizes.items())
  # Beside the state: its copy while a checkpoint is written.
  host_needs = total if device_free is not None else 2 * total
  free = [f"free on the host {'unknown' if host_free is None else gb(host_free)}"]
  if device_free is not None:
    free.insert(0, f"free on the device {gb(device_free)}")
  lines = [
    row("memory", f"{parts}; in all {gb(total)} and activations"),
    row(
      "", f"a checkpoint takes {gb(total)} of the host for a while; {', '.join(free)}"
    ),
  ]
  places = (("device", total, device_free), ("host", host_needs, host_free))
  for place, needs, available in places:
    if available is not None and needs > available:
      lines.append(
        f"warning: the run needs {gb(needs)} of the {place}'s memory and "
        f"{gb(available)} are free; give a smaller --buffer-size or --num-envs."
      )
  return lines


@contextlib.contextmanager
def timed(label: str, say: Callable[[str], None] = print) -> Iterator[None]:
  """Says that something starts and, when it is done, how long it took."""
  say(f"{label} ...")
  start = time.monotonic()
  yield
  say(f"{label}: {time.monotonic() - start:.1f} s")


def row(name: str, text: str) -> str:
  """One line of the report."""
  return f"  {name:<14}{text}"


def gb(size: float) -> str:
  """Bytes as GB, small sizes as MB."""
  return f"{size / GB:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def every(freq: int) -> str:
  """A frequency setting in words; 0 switches an event off but at the end."""
  return f"every {freq:,} agent steps" if freq else "at the end only"


def tree_bytes(tree: Any) -> int:
  """Bytes of all arrays of a pytree, or of its shapes."""
  return sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
  )


def tree_size(tree: Any) -> int:
  """Count of all numbers in a pytree, or in its shapes."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def device_text(devices: list[jax.Device]) -> str:
  """Count and kind of the devices, for a CPU also its cores."""
  first = devices[0]
  text = f"{len(devices)} x {first.device_kind} ({first.platform})"
  if first.platform == "cpu":
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    text += f", {len(usable(0))} cores"
  return text


def versions_text() -> str:
  """The versions that matter most."""
  names = ("jax", "jaxlib", "flax", "mujoco", "mujoco-mjx", "dm-control")
  versions = [f"{name} {package_version(name)}" for name in names]
  return ", ".join([f"python {platform.python_version()}", *versions])


def device_memory() -> int | None:
  """Free bytes of the first accelerator; None on a CPU or where it won't say."""
  device = jax.devices()[0]
  stats = device.memory_stats() if device.platform != "cpu" else None
  if not stats or "bytes_limit" not in stats:
    return None
  return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def free_memory() -> int | None:
  """Bytes that the host can still give, page cache counted as free."""
  try:
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
  except (OSError, KeyError, ValueError):
    return None


def existing_parent(path: pathlib.Path) -> pathlib.Path:
  """The path itself or its nearest parent that exists."""
  path = path.absolute()
  return next(p for p in (path, *path.parents) if p.exists())
