"""The only host loop: starts device calls, logs, evaluates, saves, stops cleanly."""

import concurrent.futures
import dataclasses
import math
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

import envs_mjx
from mjx_tdmpc2 import plot, probe, report
from mjx_tdmpc2.checkpoint import Checkpoints
from mjx_tdmpc2.config import Config, resolve
from mjx_tdmpc2.evaluation import Evaluator
from mjx_tdmpc2.schedule import Pace, StopSignal, event_due, next_event
from mjx_tdmpc2.sinks import Progress, RunLog, write_meta
from mjx_tdmpc2.training import Phase, Trainer, TrainState


@dataclasses.dataclass
class HostState:
  """What the host must know to go on; saved beside every checkpoint.

  Attributes:
    wall_seconds: seconds spent in this run's loop by all sessions together.
    train_seconds: the part of it that went into vector steps and updates.
    logged: vector steps at the last log row.
    logged_updates: updates at the last log row.
    logged_train_seconds: `train_seconds` at the last log row.
    evaluated: vector steps at the last evaluation; -1 before the first.
    last_return: mean return of the last evaluation.
  """

  wall_seconds: float = 0.0
  train_seconds: float = 0.0
  logged: int = 0
  logged_updates: int = 0
  logged_train_seconds: float = 0.0
  evaluated: int = -1
  last_return: float | None = None


class NonFiniteLoss(RuntimeError):
  """The learner diverged."""


class Run:
  """One run in its directory: built or restored, then driven to its end."""

  def __init__(self, config: Config, run_dir: pathlib.Path, resume: bool):
    self.config = config
    self.run_dir = run_dir
    self.resume = resume
    self.env = envs_mjx.make(config.task)
    self.resolved = resolve(config, self.env.spec, jax.default_backend())
    self.trainer = Trainer(self.resolved, self.env)
    self.evaluator = Evaluator(self.resolved, self.env)
    self.key = jax.random.key(config.seed, impl=config.prng)
    self.host = HostState()
    self.checkpoints = Checkpoints(run_dir, keep=2)
    self.progress = Progress()
    self.pace = {name: Pace() for name in ("seed", "burst", "train", "eval")}
    self.state: TrainState | None = None
    self.vector_steps = 0
    self.updates = 0
    self.saved_at = (-1, -1)

  # Start.

  def start(self, stop: StopSignal) -> None:
    """Restores or makes the state, compiles, and opens the logs."""
    abstract = jax.eval_shape(self.trainer.init, self.key)
    say = self.progress.message
    say(report.start_up(self.config, self.resolved, abstract, self.run_dir))
    write_meta(self.run_dir)
    if self.resume:
      self.state, host, _ = self.checkpoints.restore(abstract)
      self.host = HostState(**host)
      self.vector_steps = int(self.state.vector_steps)
      self.updates = int(self.state.learner.updates)
      self.saved_at = (self.vector_steps, self.updates)
    n = self.resolved.num_envs
    self.log = RunLog(
      self.run_dir,
      train_resume_at=self.host.logged * n if self.resume else None,
      eval_resume_at=self.host.evaluated * n if self.resume else None,
    )
    if self.finished or stop.name is not None:
      return
    if jax.default_backend() == "cpu" and probe.worthwhile(self.resolved):
      say(probe.estimate(self.resolved, say))
    self._compile(abstract, stop)

  def _compile(self, abstract: TrainState, stop: StopSignal) -> None:
    """Compiles every program that the run will need, and says how long it took.

    Python traces one after the other; XLA compiles side by side.
    """
    say = self.progress.message
    i32 = jax.ShapeDtypeStruct((), jnp.int32)
    eval_state = jax.eval_shape(self.evaluator.init, self.key, i32)
    programs = {
      # The longest first.
      "vector step and updates": (
        self.trainer.train_chunk,
        (abstract, i32, jax.eval_shape(Phase.seed)),
      ),
      "evaluation": (
        self.evaluator.run,
        (abstract.learner.params, eval_state, i32),
      ),
      "start of an evaluation": (self.evaluator.init, (self.key, i32)),
    }
    if self.state is None:
      programs["initial state"] = (self.trainer.init, (self.key,))

    def compiled(name, lowered):
      with report.timed(f"compiling {name}", say):
        return lowered.compile()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      jobs = {}
      for name, (function, arguments) in programs.items():
        if stop.name is None:
          jobs[name] = pool.submit(compiled, name, function.lower(*arguments))
      if stop.name is not None:
        say("stopping when the compilations under way have ended")
        return
    done = {name: job.result() for name, job in jobs.items()}
    self._train_chunk = done["vector step and updates"]
    self._eval_run = done["evaluation"]
    self._eval_init = done["start of an evaluation"]
    if self.state is None:
      self.state = jax.block_until_ready(done["initial state"](self.key))

  # The loop.

  @property
  def finished(self) -> bool:
    return self.vector_steps >= self.resolved.total_vector_steps

  @property
  def wall_seconds(self) -> float:
    return self._earlier_seconds + time.monotonic() - self._loop_start

  def loop(self, stop: StopSignal) -> None:
    """Runs to the end of the run, or until a signal was noted."""
    self._earlier_seconds = self.host.wall_seconds
    self._loop_start = time.monotonic()
    config, n = self.config, self.resolved.num_envs
    while stop.name is None:
      if burst_left := self._burst_left():
        self._run_burst(burst_left)
        continue
      v, last = self.vector_steps, self.finished
      if v > self.host.logged and (last or event_due(v, config.log_freq, n)):
        self._log_row()
      if v > self.host.evaluated and (last or event_due(v, config.eval_freq, n)):
        self._evaluate(stop)
        continue
      if v > max(0, self.saved_at[0]) and event_due(v, config.checkpoint_freq, n):
        self._save()
      if last:
        return
      self._run_chunk()

  def _burst_left(self) -> int:
    """Updates of the pretraining burst that are still to do now (spec 4.4)."""
    if self.vector_steps != self.resolved.seed_vector_steps:
      return 0
    return max(0, self.resolved.burst_updates - self.updates)

  def _run_burst(self, left: int) -> None:
    pace = self.pace["burst"]
    count = pace.units(left)
    start = time.monotonic()
    self.state = jax.block_until_ready(
      self._train_chunk(self.state, jnp.int32(1), Phase.burst(count))
    )
    seconds = time.monotonic() - start
    pace.measured(count, seconds)
    self.host.train_seconds += seconds
    self.updates += count
    self._show("burst", self.updates, self.resolved.burst_updates)

  def _run_chunk(self) -> None:
    v, n, config = self.vector_steps, self.resolved.num_envs, self.config
    seeding = v < self.resolved.seed_vector_steps
    phase = "seed" if seeding else "train"
    until = min(
      self.resolved.seed_vector_steps if seeding else math.inf,
      self.resolved.total_vector_steps,
      next_event(v, config.log_freq, n),
      next_event(v, config.eval_freq, n),
      next_event(v, config.checkpoint_freq, n),
    )
    steps = self.pace[phase].units(int(until) - v)
    updates = 0 if seeding else self.resolved.updates_per_step
    kind = Phase.seed() if seeding else Phase.train(updates)
    start = time.monotonic()
    self.state = jax.block_until_ready(
      self._train_chunk(self.state, jnp.int32(steps), kind)
    )
    seconds = time.monotonic() - start
    self.pace[phase].measured(steps, seconds)
    self.host.train_seconds += seconds
    self.vector_steps += steps
    self.updates += steps * updates
    self._show(phase, self.vector_steps * n, self.resolved.total_vector_steps * n)

  def _evaluate(self, stop: StopSignal) -> None:
    """One evaluation in pieces; dropped when a signal comes, redone on resume."""
    v = self.vector_steps
    pace, length = self.pace["eval"], self.resolved.episode_length
    start = time.monotonic()
    eval_state = self._eval_init(self.key, jnp.int32(v))
    done = 0
    while done < length:
      if stop.name is not None:
        return
      steps = pace.units(length - done)
      piece = time.monotonic()
      eval_state = jax.block_until_ready(
        self._eval_run(self.state.learner.params, eval_state, jnp.int32(steps))
      )
      pace.measured(steps, time.monotonic() - piece)
      done += steps
      self._show("eval", done, length)
    result = self.evaluator.result(eval_state)
    row = result.row()
    self.host.evaluated = v
    self.host.last_return = row["return_mean"]
    self.log.eval(
      {**self._counts(), **row, "seconds": time.monotonic() - start}
    )
    self.progress.message(
      f"evaluation at {v * self.resolved.num_envs:,} agent steps: return "
      f"{row['return_mean']:.1f} ± {row['return_std']:.1f} "
      f"({row['episodes']} episodes)"
    )
    if result.bad_episodes:
      self.progress.message(
        f"warning: {result.bad_episodes} evaluation episode(s) ended early because "
        "a physics state was not finite; their returns are too low"
      )

  # Output.

  def _counts(self) -> dict[str, int]:
    agent_steps = self.vector_steps * self.resolved.num_envs
    return {
      "agent_steps": agent_steps,
      "env_steps": agent_steps * self.env.spec.action_repeat,
    }

  def _log_row(self) -> None:
    """Writes the sums since the last row and starts new ones."""
    host, n = self.host, self.resolved.num_envs
    metrics = jax.device_get(self.state.metrics)
    self.state = self.state.replace(metrics=self.trainer.zero_metrics())
    seconds = max(host.train_seconds - host.logged_train_seconds, 1e-9)
    episodes = int(metrics.episodes)
    row = {
      **self._counts(),
      "updates": self.updates,
      "wall_seconds": self.wall_seconds,
      "agent_steps_per_second": (self.vector_steps - host.logged) * n / seconds,
      "updates_per_second": (self.updates - host.logged_updates) / seconds,
      "episodes": episodes or None,
      "episode_return": metrics.episode_return / episodes if episodes else None,
      "bad_env_resets": int(metrics.bad_env_resets),
      "contact_overflow": int(metrics.contact_overflow),
    }
    count = int(metrics.updates)
    for name, total in metrics.losses.items():
      row[name] = float(total) / count if count else None
    self.log.train(row)
    host.logged, host.logged_updates = self.vector_steps, self.updates
    host.logged_train_seconds = host.train_seconds
    if count and not math.isfinite(row["total_loss"]):
      raise NonFiniteLoss(
        f"the losses became {row['total_loss']} before agent step "
        f"{row['agent_steps']:,}; the run stops without saving, its last checkpoint "
        f"in {self.run_dir / 'checkpoints'} is from before that"
      )
    if episodes:
      self.last_episode_return = float(row["episode_return"])

  last_episode_return: float | None = None

  def _show(self, phase: str, done: int, total: int) -> None:
    self.progress.update(
      phase=phase,
      done=done,
      total=total,
      episode_return=self.last_episode_return,
      **self._counts(),
    )

  # Saving.

  def _save(self) -> None:
    self.host.wall_seconds = self.wall_seconds
    self.checkpoints.save(
      # Grows with every piece of work, also within the burst.
      step=self.vector_steps + self.updates,
      state=self.state,
      learner=self.state.learner,
      host=dataclasses.asdict(self.host),
    )
    self.saved_at = (self.vector_steps, self.updates)

  def finish(self) -> None:
    """Saves what is new and waits for it."""
    if self.state is not None and self.saved_at != (self.vector_steps, self.updates):
      self._save()
    self.checkpoints.wait()

  def close(self) -> None:
    """Closes logs and checkpoints."""
    self.progress.close()
    if hasattr(self, "log"):
      self.log.close()
    self.checkpoints.close()


def run(config: Config, run_dir: pathlib.Path, resume: bool) -> int:
  """Trains until the configured total, or until SIGINT or SIGTERM.

  Args:
    config: the run's settings.
    run_dir: an empty directory, or with `resume` the directory of a run.
    resume: go on from the newest complete checkpoint in `run_dir`.

  Returns:
    The process's exit code: 0 when finished or stopped by a signal, 1 when the
    losses became non-finite or a checkpoint could not be written.
  """
  job = Run(config, run_dir, resume)
  try:
    with StopSignal() as stop:
      job.start(stop)
      already_done = job.resume and job.finished
      job.loop(stop)
      job.finish()
  except NonFiniteLoss as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  finally:
    job.close()
  if job.finished and stop.name is None:
    picture = plot.learning_curve(run_dir)
    state = "was already finished" if already_done else "is finished"
    print(
      f"The run {state}: {job.resolved.total_vector_steps * job.resolved.num_envs:,} "
      f"agent steps, last evaluation return {job.host.last_return}; learning curve "
      f"in {picture}. Give a larger --total-steps with --resume {run_dir} to go on."
    )
  else:
    print(
      f"Stopped by {stop.name}"
      f"{' and saved' if job.state is not None else ' before the first step'}. "
      "Go on with: "
      f"python train.py --resume {run_dir}"
    )
  return 0
