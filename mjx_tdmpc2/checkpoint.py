"""Checkpoints of a run: asynchronous saving, strict and bit-exact restoring.

A checkpoint is one directory `RUN_DIR/checkpoints/STEP` with four Orbax items:

  state     every array of the training state, enough to go on bit for bit
  learner   the agent alone, small: for evaluation and for sharing
  host      JSON: the host's counters
  manifest  JSON: format version, and path, shape, dtype and checksum per array

Arrays are stored under their tree path, so nothing but numbers and text is
ever read back: no class is imported and nothing is executed. The manifest lets
a restore name the field that does not fit before it reads any array, and the
checksums tell a damaged checkpoint from a good one.
"""

import logging
import pathlib
import shutil
import sys
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

FORMAT_VERSION = 1
DIRECTORY = "checkpoints"
# Large arrays are stored in pieces and files of this size: they are compressed in
# parallel, and writing needs some pieces of memory, not a second copy of the replay.
_CHUNK_BYTES = 64 * 2**20
_ITEMS = ("state", "learner")

# Orbax reports routine and failures to the log of absl, across the progress line.
# Failures reach the user as CheckpointError.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


class CheckpointError(ValueError):
  """A checkpoint that cannot be used, in one sentence for the user."""


class Checkpoints:
  """The checkpoints of one run directory; the newest `keep` are kept.

  Opening one writes nothing: directories are made, and leftovers of a killed
  save are removed, with the first save.
  """

  def __init__(
    self,
    run_dir: str | pathlib.Path,
    keep: int = 2,
    warn: Callable[[str], None] | None = None,
  ):
    """Opens the checkpoints of a run, which may have none yet.

    Args:
      run_dir: the run directory; checkpoints lie in its `checkpoints` folder.
      keep: how many complete checkpoints stay; an older one is deleted only
        after its successor is complete.
      warn: takes a one-line warning; prints it on stderr by default.
    """
    self.directory = pathlib.Path(run_dir).absolute() / DIRECTORY
    self._keep = keep
    self._warn = warn or (lambda text: print(f"warning: {text}", file=sys.stderr))
    self._manager: ocp.CheckpointManager | None = None
    self._damaged: list[int] = []

  def save(self, step: int, state: Any, learner: Any, host: dict) -> bool:
    """Starts to save and returns once the arrays are copied to the host.

    The copy is complete on return, so the caller may at once donate the
    buffers of `state`. Only one save is ever under way: this waits for the
    previous one, and raises what made it fail.

    Args:
      step: agent steps so far; names the checkpoint.
      state: pytree of arrays, typed PRNG keys included.
      learner: pytree of arrays; arrays it shares with `state` are copied once.
      host: JSON values (counters, seconds).

    Returns:
      False when a complete checkpoint of this step exists already (a run that
      is stopped right after it was resumed), which is then left as it is.

    Raises:
      CheckpointError: this or the previous save failed.
    """
    try:
      manager = self._open_manager()
      manager.wait_until_finished()
      if step in manager.all_steps():
        return False
      copies: dict[int, np.ndarray] = {}
      trees = dict(zip(_ITEMS, (state, learner), strict=True))
      arrays = {name: _host_arrays(tree, copies) for name, tree in trees.items()}
      manifest = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "fields": {name: _describe(trees[name], arrays[name]) for name in _ITEMS},
      }
      manager.save(
        step,
        args=ocp.args.Composite(
          **{name: _save_args(arrays[name]) for name in _ITEMS},
          host=ocp.args.JsonSave(host),
          manifest=ocp.args.JsonSave(manifest),
        ),
      )
    except CheckpointError:
      raise
    except Exception as e:
      raise self._failed(e) from e
    return True

  def restore(self, abstract_state: Any) -> tuple[Any, dict, int]:
    """Reads the newest complete checkpoint.

    A checkpoint that a kill cut short, or that is damaged, is skipped for the
    one before it, with a warning.

    Args:
      abstract_state: the state to be filled: arrays, or the
        `jax.ShapeDtypeStruct`s of `jax.eval_shape`. An array goes where its
        sharding says, to the default device where there is none.

    Returns:
      (state, host, step): as they were saved, bit for bit.

    Raises:
      CheckpointError: there is no usable checkpoint, or the newest one does
        not fit `abstract_state` or this format.
    """
    steps = self.steps()
    cut_short = [s for s in _unfinished_steps(self.directory) if s not in steps]
    newer = [s for s in cut_short if not steps or s > steps[-1]]
    if newer:
      self._warn(
        f"the checkpoint of step {max(newer)} in {self.directory} was cut "
        "short and is skipped."
      )
    for step in reversed(steps):
      path = self.directory / str(step)
      try:
        state = _restore_item(path, "state", abstract_state)
        host = _read_json(path, "host")
      except _Damaged as e:
        self._warn(f"the checkpoint {path} is damaged and is skipped ({e}).")
        self._damaged.append(step)
        continue
      return state, host, step
    raise CheckpointError(
      f"There is no complete checkpoint in {self.directory}; start the run "
      "again in a new directory."
    )

  def steps(self) -> list[int]:
    """Steps of the complete checkpoints, oldest first."""
    return _complete_steps(self.directory)

  def wait(self) -> None:
    """Waits for the save under way.

    Raises:
      CheckpointError: it failed.
    """
    if self._manager is None:
      return
    try:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    except Exception as e:
      raise self._failed(e) from e

  def close(self) -> None:
    """Waits for the save under way and ends the threads; raises as `wait`."""
    self.wait()
    manager, self._manager = self._manager, None
    if manager is not None:
      manager.close()

  def _failed(self, error: Exception) -> CheckpointError:
    # The manager counts the failed step as one of the newest, and would delete a
    # good checkpoint for it: the next save needs a new one.
    self._manager = None
    return CheckpointError(
      f"Saving a checkpoint in {self.directory} failed: {_one_line(error)}"
    )

  def _open_manager(self) -> ocp.CheckpointManager:
    if self._manager is not None:
      return self._manager
    # A damaged checkpoint would count as one of the newest and push out a good
    # one, and its step will be reached again.
    for step in self._damaged:
      shutil.rmtree(self.directory / str(step))
    self._damaged.clear()
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=self._keep, cleanup_tmp_directories=True
      ),
      item_handlers={
        "state": _array_handler(),
        "learner": _array_handler(),
        "host": ocp.JsonCheckpointHandler(),
        "manifest": ocp.JsonCheckpointHandler(),
      },
    )
    return self._manager


def load_learner(path: str | pathlib.Path, abstract_learner: Any) -> Any:
  """Reads the agent from a run directory or from one checkpoint.

  Args:
    path: a run directory (its newest complete checkpoint is taken) or one
      checkpoint directory; of that, the folders `learner` and `manifest` are
      enough.
    abstract_learner: as in `Checkpoints.restore`.

  Raises:
    CheckpointError: there is none, it is damaged, or it does not fit.
  """
  path = pathlib.Path(path).absolute()
  if not (path / "learner").is_dir():
    steps = _complete_steps(path / DIRECTORY)
    if not steps:
      raise CheckpointError(
        f"{path} is neither a run directory with a complete checkpoint nor a "
        "checkpoint."
      )
    path = path / DIRECTORY / str(steps[-1])
  try:
    return _restore_item(path, "learner", abstract_learner)
  except _Damaged as e:
    raise CheckpointError(f"The checkpoint {path} is damaged: {e}.") from e


class _Damaged(Exception):
  """A checkpoint that cannot be read, whatever is expected of it."""


def _complete_steps(directory: pathlib.Path) -> list[int]:
  if not directory.is_dir():
    return []
  # Orbax writes under another name and renames when all is there.
  names = [d.name for d in directory.iterdir() if d.is_dir()]
  return sorted(int(name) for name in names if name.isdigit())


def _unfinished_steps(directory: pathlib.Path) -> list[int]:
  if not directory.is_dir():
    return []
  names = [d.name for d in directory.iterdir() if "checkpoint-tmp" in d.name]
  heads = [name.split(".")[0] for name in names]
  return [int(head) for head in heads if head.isdigit()]


def _array_handler() -> ocp.PyTreeCheckpointHandler:
  # The arrays handed over are our own copies: Orbax need not copy them again.
  handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
  return ocp.PyTreeCheckpointHandler(
    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
      (np.ndarray, handler)
    )
  )


def _is_key(leaf: Any) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _fields(tree: Any) -> dict[str, Any]:
  """Leaves by dotted tree path, such as `replay.obs` or `opt.0.mu.w`."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  fields = {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in leaves
  }
  if len(fields) != len(leaves):
    raise CheckpointError("Two fields of the state have the same path.")
  return fields


def _host_arrays(tree: Any, copies: dict[int, np.ndarray]) -> dict[str, np.ndarray]:
  """Copies of all arrays by path, key data for keys; `copies` by leaf id.

  On a CPU `np.asarray` of a JAX array is a view of its buffer, which a donated
  call overwrites while Orbax still writes: hence the explicit copy.
  """
  arrays = {}
  for path, leaf in _fields(tree).items():
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
      raise CheckpointError(
        f"Field {path} of the state is a {type(leaf).__name__}; expected an array."
      )
    if id(leaf) not in copies:
      data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
      copies[id(leaf)] = np.array(data, order="C", copy=True)
    arrays[path] = copies[id(leaf)]
  return arrays


def _describe(tree: Any, arrays: dict[str, np.ndarray]) -> dict[str, dict]:
  """The manifest's entry per field."""
  entries = {}
  for path, leaf in _fields(tree).items():
    entries[path] = {
      "shape": list(leaf.shape),
      "dtype": str(leaf.dtype),
      "crc32": _checksum(arrays[path]),
    }
    if _is_key(leaf):
      entries[path]["key_impl"] = str(jax.random.key_impl(leaf))
  return entries


def _checksum(array: np.ndarray) -> int:
  return zlib.crc32(array.reshape(-1).view(np.uint8))


def _save_args(arrays: dict[str, np.ndarray]) -> ocp.args.PyTreeSave:
  # Orbax stores no empty arrays; the manifest is enough to make them again.
  stored = {path: array for path, array in arrays.items() if array.size}
  chunked = {path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for path in stored}
  return ocp.args.PyTreeSave(
    stored, save_args=chunked, ocdbt_target_data_file_size=_CHUNK_BYTES
  )


def _read_json(path: pathlib.Path, item: str) -> dict:
  try:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
      return reader.restore(path / item)
  except Exception as e:
    raise _Damaged(f"{item}: {_one_line(e)}") from e


def _restore_item(path: pathlib.Path, item: str, abstract: Any) -> Any:
  """Restores one pytree item after checking that it fits."""
  manifest = _read_json(path, "manifest")
  version = manifest.get("format_version")
  if version != FORMAT_VERSION:
    raise CheckpointError(
      f"The checkpoint {path} has format version {version}, this program reads "
      f"version {FORMAT_VERSION}: use the release that wrote it, or start anew."
    )
  entries = manifest["fields"][item]
  wanted = _fields(abstract)
  _check_fit(path, item, entries, wanted)
  arrays = _read_arrays(path / item, entries)
  for name, entry in entries.items():
    if _checksum(arrays[name]) != entry["crc32"]:
      raise _Damaged(f"the checksum of {name} differs")
  leaves = []
  for name, target in wanted.items():
    # pop: the host's copy of a large array goes as soon as it is placed.
    leaves.append(_place(arrays.pop(name), target, entries[name].get("key_impl")))
  return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(abstract), leaves)


def _check_fit(
  path: pathlib.Path, item: str, entries: dict[str, dict], wanted: dict[str, Any]
) -> None:
  where = f"The {item} in checkpoint {path} does not fit these settings: field"
  remedy = "use the settings of the run that wrote it."
  for name, target in wanted.items():
    if name not in entries:
      raise CheckpointError(f"{where} {name} is expected and not in it; {remedy}")
    got = (tuple(entries[name]["shape"]), entries[name]["dtype"])
    expected = (tuple(target.shape), str(target.dtype))
    for what, a, b in zip(("shape", "dtype"), got, expected, strict=True):
      if a != b:
        raise CheckpointError(f"{where} {name} has {what} {a}, expected {b}; {remedy}")
  for name in entries:
    if name not in wanted:
      raise CheckpointError(f"{where} {name} is in it and not expected; {remedy}")


def _read_arrays(path: pathlib.Path, entries: dict[str, dict]) -> dict[str, np.ndarray]:
  arrays = {}
  stored = {}
  for name, entry in entries.items():
    if 0 in entry["shape"]:
      shape, dtype = _stored_form(entry)
      arrays[name] = np.zeros(shape, dtype)
    else:
      stored[name] = ocp.RestoreArgs(restore_type=np.ndarray)
  if stored:
    try:
      with ocp.Checkpointer(_array_handler()) as reader:
        args = ocp.args.PyTreeRestore(restore_args=stored)
        arrays |= reader.restore(path, args=args)
    except Exception as e:
      raise _Damaged(f"{path.name}: {_one_line(e)}") from e
  return arrays


def _stored_form(entry: dict) -> tuple[tuple[int, ...], Any]:
  """Shape and dtype under which a field's numbers are stored."""
  shape = tuple(entry["shape"])
  if "key_impl" not in entry:
    return shape, jax.numpy.dtype(entry["dtype"])
  one_key = jax.random.key_data(jax.random.key(0, impl=entry["key_impl"]))
  return shape + one_key.shape, one_key.dtype


def _place(array: np.ndarray, target: Any, key_impl: str | None) -> jax.Array:
  """Puts an array where `target` lies, as a buffer of JAX's own.

  On a CPU `device_put` takes numpy's memory over whenever it is aligned,
  `may_alias=False` or not, and such an array cannot be donated: hence the copy.
  """
  sharding = getattr(target, "sharding", None)
  if isinstance(target, jax.Array) and not target.committed:
    sharding = None
  if key_impl is None:
    return jax.device_put(array, sharding).copy()
  keys = jax.random.wrap_key_data(jax.numpy.array(array), impl=key_impl)
  return keys if sharding is None else jax.device_put(keys, sharding)


def _one_line(error: Exception) -> str:
  text = " ".join(str(error).split())
  return f"{type(error).__name__}: {text[:160]}"
