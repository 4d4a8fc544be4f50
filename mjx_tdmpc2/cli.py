"""The command line: flags and presets to settings, a run directory, and a run.

Settings come from, later ones winning: defaults, the file of --config, flags. Heavy
modules are imported where they are used, so that --help and mistakes answer at once.
"""

import contextlib
import dataclasses
import io
import os
import pathlib
import sys
import typing
from typing import TYPE_CHECKING, Any, NamedTuple

import tyro

import mjx_tdmpc2
from mjx_tdmpc2.config import Config, ConfigError, complete, resolve
from mjx_tdmpc2.config_file import dump, load_yaml, merge
from mjx_tdmpc2.validation import alternatives, choices, describe, flag, near_miss

if TYPE_CHECKING:
  from envs_mjx.base import EnvSpec

CONFIG_FILE = "config.yaml"
# The only settings that may differ when a run goes on: how long, how often, where.
RESUMABLE = frozenset({
  "total_steps", "eval_freq", "eval_episodes", "checkpoint_freq", "log_freq",
  "platform", "plan_chunk", "q_layout", "cache_dir",
})


@dataclasses.dataclass(frozen=True)
class Command:
  """What to do."""

  config: str | None = None
  """YAML file with settings; flags win over it."""
  run_dir: str | None = None
  """Where the run goes. None: runs/TASK/NAME/seedSEED."""
  resume: str | None = None
  """Directory of a run to go on with; its settings are used."""
  resume_or_start: tyro.conf.FlagCreatePairsOff[bool] = False
  """Go on with the run in the run directory, or start it where there is none."""
  print_config: tyro.conf.FlagCreatePairsOff[bool] = False
  """Print the settings with all numbers decided, and exit."""
  list_tasks: tyro.conf.FlagCreatePairsOff[bool] = False
  """Print the tasks, and exit."""
  version: tyro.conf.FlagCreatePairsOff[bool] = False
  """Print the version, and exit."""


@dataclasses.dataclass(frozen=True)
class _Flags:
  command: tyro.conf.OmitArgPrefixes[Command]
  run: tyro.conf.OmitArgPrefixes[Config]


class Request(NamedTuple):
  """A parsed command line.

  Attributes:
    command: what to do.
    config: the settings; with `resume` those of the run, with the changes asked for.
  """

  command: Command
  config: Config


def main(argv: list[str] | None = None) -> int:
  """Runs one command line and returns the process's exit code.

  Args:
    argv: arguments without the program's name; those of the process by default.
  """
  try:
    request = parse(sys.argv[1:] if argv is None else argv)
    return _execute(request)
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:  # While nothing was under way that needs saving.
    return 130


def parse(argv: list[str]) -> Request:
  """Reads flags, preset and, on resume, the run's settings.

  Raises:
    ConfigError: an unknown flag, key or value, or a conflict with the run.
    SystemExit: after printing the help.
  """
  given = _given_fields(argv)
  command = _tyro(argv, Config()).command
  if command.list_tasks or command.version:
    return Request(command, Config())
  if command.resume is not None and (command.run_dir or command.resume_or_start):
    other = "--run-dir" if command.run_dir else "--resume-or-start"
    raise ConfigError(f"--resume names the run to go on with; leave out {other}.")
  preset = load_yaml(command.config) if command.config else {}
  config = _tyro(argv, merge(Config(), preset)).run
  if command.resume_or_start:
    command = _find_run(command, config)
  if command.resume is None:
    return Request(command, config)
  recorded = _recorded_config(pathlib.Path(command.resume))
  asked = {name: getattr(config, name) for name in (*preset, *given)}
  # None asks for what follows from other settings, which the run has decided.
  asked = {name: value for name, value in asked.items() if value is not None}
  _check_resumable(command.resume, recorded, asked)
  return Request(command, merge(recorded, asked))


def _execute(request: Request) -> int:
  command, config = request
  if command.version:
    print(f"mjx-tdmpc2 {mjx_tdmpc2.__version__}")
    return 0
  if command.list_tasks:
    _list_tasks()
    return 0
  _set_up_jax(config)
  env_spec = _env_spec(config.task)
  config = complete(config, env_spec)
  if command.print_config:
    _print_config(config, env_spec)
    return 0
  if command.resume is None:
    run_dir = _run_dir(command, config)
    _claim(run_dir)
  else:
    run_dir = pathlib.Path(command.resume)
  _write_config(run_dir, config)
  return _train(config, run_dir)


def _train(config: Config, run_dir: pathlib.Path) -> int:
  from mjx_tdmpc2 import runner
  from mjx_tdmpc2.checkpoint import CheckpointError, Checkpoints

  try:
    # A run that was killed before its first checkpoint starts from the beginning.
    resume = bool(Checkpoints(run_dir).steps())
    return runner.run(config, run_dir, resume)
  except CheckpointError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1


# Flags.


def _given_fields(argv: list[str]) -> list[str]:
  """Checks every flag by itself and names the fields of `Config` that are given.

  Tyro would find the same mistakes; its boxed reports do not fit our errors.
  """
  hints = typing.get_type_hints(Command) | typing.get_type_hints(Config)
  on = {flag(name): name for name in hints}
  actions = set(typing.get_type_hints(Command))
  off = {
    flag(f"no_{name}"): name
    for name, hint in hints.items()
    if hint is bool and name not in actions
  }
  given = []
  words = iter(argv)
  for word in words:
    if word in ("-h", "--help"):
      continue
    label, equals, raw = word.partition("=")
    if label in off and not equals:
      given.append(off[label])
      continue
    if label not in on:
      raise ConfigError(_unknown_argument(label, [*on, *off]))
    name = on[label]
    given.append(name)
    if hints[name] is bool:
      if equals:
        raise ConfigError(f"{label} takes no value, got {raw!r}.")
      continue
    if not equals:
      raw = next(words, None)
      if raw is None or raw.startswith("--"):
        raise ConfigError(f"{label} needs a value: {describe(hints[name])}.")
    _check_raw(label, hints[name], raw)
  return [name for name in given if name not in actions]


def _unknown_argument(word: str, valid: list[str]) -> str:
  if not word.startswith("-"):
    return f"Unexpected argument {word!r}; every setting is a --flag with a value."
  hint = near_miss(word, valid) or " See --help for all flags."
  return f"Unknown flag {word}.{hint}"


def _check_raw(label: str, hint: Any, raw: str) -> None:
  """Checks that the text of a flag's value can be read as the field's type."""
  for kind in alternatives(hint):
    if kind is str or raw in map(str, choices(kind)):
      return
    if kind is type(None) and raw == "None":
      return
    if kind in (int, float):
      with contextlib.suppress(ValueError):
        kind(raw)
        return
  raise ConfigError(
    f"{label} expects {describe(hint)}, got {raw!r}."
    f"{near_miss(raw, map(str, choices(hint)))}"
  )


def _tyro(argv: list[str], config: Config) -> _Flags:
  """Command and settings, with `config` as the settings' defaults."""
  is_help = "-h" in argv or "--help" in argv
  noise = io.StringIO()
  quiet = contextlib.nullcontext() if is_help else contextlib.redirect_stderr(noise)
  try:
    with quiet:
      return tyro.cli(
        _Flags,
        prog="train.py",
        description="Trains TD-MPC2 on a batch of MJX environments.",
        args=argv,
        default=_Flags(Command(), config),
      )
  except SystemExit as error:
    if is_help and not error.code:
      raise
    raise ConfigError("The command line cannot be read; see --help.") from None


# Resuming.


def _find_run(command: Command, config: Config) -> Command:
  """Turns --resume-or-start into --resume where there is a run to go on with."""
  task = _import_envs().registry.canonical_name(config.task)
  run_dir = _run_dir(command, dataclasses.replace(config, task=task))
  if not (run_dir / CONFIG_FILE).is_file():
    return command
  return dataclasses.replace(command, resume=str(run_dir), run_dir=None)


def _recorded_config(run_dir: pathlib.Path) -> Config:
  """The settings that a run directory records."""
  if not (run_dir / CONFIG_FILE).is_file():
    what = "has no config.yaml" if run_dir.is_dir() else "is no directory"
    raise ConfigError(
      f"--resume {run_dir} is not a run: it {what}; give the directory that a run"
      " named when it started."
    )
  values = load_yaml(run_dir / CONFIG_FILE)
  return merge(Config(), values)


def _check_resumable(
  run_dir: str, recorded: Config, asked: dict[str, Any]
) -> None:
  """Refuses settings that would change what the run learns."""
  if "task" in asked:
    canonical_name = _import_envs().registry.canonical_name
    asked = asked | {"task": canonical_name(asked["task"])}
  conflicts = [
    f"{flag(name)} (the run has {getattr(recorded, name)}, got {value})"
    for name, value in asked.items()
    if name not in RESUMABLE and value != getattr(recorded, name)
  ]
  if conflicts:
    raise ConfigError(
      f"The run in {run_dir} cannot go on with another {', '.join(conflicts)}; leave"
      f" that out, or start a new run. On resume these may change:"
      f" {', '.join(map(flag, sorted(RESUMABLE)))}."
    )


# The run directory.


def _run_dir(command: Command, config: Config) -> pathlib.Path:
  if command.run_dir is not None:
    return pathlib.Path(command.run_dir)
  return pathlib.Path("runs", config.task, config.name, f"seed{config.seed}")


def _claim(run_dir: pathlib.Path) -> None:
  """Makes the directory of a new run; never takes one with something in it."""
  try:
    run_dir.mkdir(parents=True, exist_ok=True)
    occupied = any(run_dir.iterdir())
  except OSError as error:
    raise ConfigError(
      f"Cannot make the run directory {run_dir}: {error.strerror}; choose another"
      " with --run-dir."
    ) from None
  if not occupied:
    return
  if (run_dir / CONFIG_FILE).is_file():
    raise ConfigError(
      f"{run_dir} holds a run already; go on with it by --resume {run_dir}, or choose"
      " another --run-dir, --name or --seed."
    )
  raise ConfigError(
    f"{run_dir} is not empty and holds no run; choose another --run-dir or --name."
  )


def _write_config(run_dir: pathlib.Path, config: Config) -> None:
  """Records the settings; the file is whole at any time."""
  target = run_dir / CONFIG_FILE
  partial = target.with_suffix(".partial")
  try:
    partial.write_text(dump(config), encoding="utf-8")
    os.replace(partial, target)
  except OSError as error:
    raise ConfigError(
      f"Cannot write to the run directory {run_dir}: {error.strerror}; choose another"
      " or make it writable."
    ) from None


# JAX and the environments.


def _set_up_jax(config: Config) -> None:
  """Chooses platform and compilation cache before JAX starts its backend."""
  import jax

  if config.platform is not None:
    jax.config.update("jax_platforms", config.platform)
  if config.cache_dir is not None or "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache_dir = os.path.expanduser(config.cache_dir or "~/.cache/mjx-tdmpc2")
    jax.config.update("jax_compilation_cache_dir", cache_dir)
  try:
    jax.devices()
  except RuntimeError:
    platform = jax.config.jax_platforms
    raise ConfigError(
      f"JAX finds no device for --platform {platform} here; choose another one, or"
      " leave out the flag and JAX_PLATFORMS to let JAX choose."
    ) from None


def _import_envs():
  """Imports the environments without what their libraries say about graphics."""
  os.environ.setdefault("MUJOCO_GL", "disable")  # Else dm_control tries a window.
  with contextlib.redirect_stdout(io.StringIO()):
    import envs_mjx
  return envs_mjx


def _env_spec(task: str) -> "EnvSpec":
  envs_mjx = _import_envs()
  if envs_mjx.registry.canonical_name(task) not in envs_mjx.ALL_TASKS:
    hint = near_miss(task, envs_mjx.ALL_TASKS) or " See --list-tasks."
    raise ConfigError(f"--task {task} is unknown.{hint}")
  return envs_mjx.make(task).spec


def _list_tasks() -> None:
  envs_mjx = _import_envs()
  print(f"{'task':<26}{'observation':>12}{'action':>8}  model")
  for title, names in (
    ("The paper's tasks", envs_mjx.TASKS),
    ("More tasks", envs_mjx.EXTRA_TASKS),
  ):
    print(f"{title}:")
    for name in names:
      env = envs_mjx.make(name)
      sizes = f"{env.spec.obs_size:>12}{env.spec.action_size:>8}"
      print(f"{name:<26}{sizes}  {env.task.physics.model.nbody - 1} bodies")
  print("Every episode has 500 agent steps of 2 control steps each.")


def _print_config(config: Config, env_spec: "EnvSpec") -> None:
  """Prints YAML; what is no setting but follows from them is in comments."""
  import jax

  resolved = resolve(config, env_spec, jax.default_backend())
  print(dump(config), end="")
  for name in (
    "updates_per_step",
    "seed_vector_steps",
    "burst_updates",
    "total_vector_steps",
    "slots",
  ):
    print(f"# {name}: {getattr(resolved, name)}")
