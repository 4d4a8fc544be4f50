"""Checkpoints: bit-exact, safe under donation, and honest about damage."""

import pathlib
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mjx_tdmpc2 import checkpoint
from mjx_tdmpc2.checkpoint import CheckpointError, Checkpoints, load_learner


class Plan(NamedTuple):
  mean: jax.Array
  empty: jax.Array


@flax.struct.dataclass
class State:
  learner: dict
  plan: Plan
  replay: tuple
  key: jax.Array
  env_keys: jax.Array
  count: jax.Array


def make_state(seed: int = 0, rows: int = 300, observation: int = 5) -> State:
  rng = np.random.default_rng(seed)
  params = {
    "w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
    "heads": [jnp.asarray(rng.normal(size=3), jnp.float32) for _ in range(2)],
  }
  odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-42], np.float32)
  payload = np.array([0x7FC12345, 0xFFC00001], np.uint32).view(np.float32)
  return State(
    learner={"params": params, "opt": optax.adam(1e-3).init(params)},
    plan=Plan(jnp.asarray(odd), jnp.zeros((0, 4))),
    replay=(
      jnp.asarray(rng.normal(size=(rows, observation)), jnp.float32),
      jnp.asarray(rng.integers(0, 2, rows), bool),
      jnp.asarray(rng.integers(-9, 9, rows), jnp.int32),
      jnp.asarray(payload),
      jnp.full((6,), -0.0, jnp.float32),
      jnp.asarray(rng.normal(size=3), jnp.bfloat16),
    ),
    key=jax.random.key(seed + 7),
    env_keys=jax.random.split(jax.random.key(seed, impl="rbg"), 3),
    count=jnp.asarray(2**32 - 5, jnp.uint32),
  )


def to_numpy(tree):
  def one(leaf):
    key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(leaf) if key else leaf)

  return jax.tree.map(one, tree)


def assert_same_bits(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
  a, b = to_numpy(got), to_numpy(expected)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.tobytes() == y.tobytes()


def save_steps(run_dir, *steps):
  checkpoints = Checkpoints(run_dir)
  for step in steps:
    state = make_state(step)
    checkpoints.save(step, state, state.learner["params"], {"step": step})
  checkpoints.close()


ABSTRACT = jax.eval_shape(make_state)


def test_every_leaf_comes_back_bit_for_bit(tmp_path):
  state = make_state()
  checkpoints = Checkpoints(tmp_path)
  host = {"episodes": 3, "wall_seconds": 1.25, "names": ["a"]}
  assert checkpoints.save(17, state, state.learner, host)
  checkpoints.close()
  for abstract in (ABSTRACT, make_state(seed=3)):
    restored, got_host, step = Checkpoints(tmp_path).restore(abstract)
    assert_same_bits(restored, state)
    assert (got_host, step) == (host, 17)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(restored))
  draw = jax.random.uniform(restored.env_keys[1], (4,))
  np.testing.assert_array_equal(draw, jax.random.uniform(state.env_keys[1], (4,)))


def test_donating_the_state_right_after_save_does_not_change_what_is_saved(tmp_path):
  state = {"replay": jnp.arange(3_000_000, dtype=jnp.float32), "n": jnp.int32(1)}
  expected = to_numpy(state)
  overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
  scratch = jax.tree.map(jnp.zeros_like, state)
  jax.block_until_ready(overwrite(scratch))  # Compiles.
  checkpoints = Checkpoints(tmp_path)
  pointer = state["replay"].unsafe_buffer_pointer()
  checkpoints.save(1, state, {"n": state["n"]}, {})
  after = jax.block_until_ready(overwrite(state))
  # The test is void unless the buffer was indeed written in place.
  assert after["replay"].unsafe_buffer_pointer() == pointer
  assert float(after["replay"][5]) == -1
  checkpoints.close()
  restored, _, _ = Checkpoints(tmp_path).restore(after)
  np.testing.assert_array_equal(restored["replay"], expected["replay"])
  assert int(restored["n"]) == 1


@pytest.mark.parametrize("offset", [0, 4])
def test_a_restored_array_can_be_donated(offset):
  # JAX on a CPU shares the memory of a numpy array that lies at a multiple of 64.
  memory = np.zeros(3_000_000 + 32, np.float32)
  start = (-memory.ctypes.data % 64 + offset) // 4
  stored = memory[start : start + 3_000_000]
  assert stored.ctypes.data % 64 == offset
  restored = checkpoint._place(stored, jnp.zeros(3_000_000), None)
  pointer = restored.unsafe_buffer_pointer()
  after = jax.jit(lambda x: x + 1, donate_argnums=0)(restored)
  assert after.unsafe_buffer_pointer() == pointer
  np.testing.assert_array_equal(stored, 0)
  np.testing.assert_array_equal(after, 1)


def test_large_arrays_are_stored_in_pieces(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 1000)
  state = {"x": jnp.arange(5000.0).reshape(50, 100), "y": jnp.arange(999)}
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state, state, {})
  checkpoints.close()
  assert_same_bits(Checkpoints(tmp_path).restore(state)[0], state)


def test_newest_two_are_kept_and_the_older_outlives_an_unfinished_save(
  tmp_path, monkeypatch
):
  save_steps(tmp_path, 1, 2, 3)
  checkpoints = Checkpoints(tmp_path)
  assert checkpoints.steps() == [2, 3]

  async def fail(*args, **kwargs):
    raise OSError("no space left")

  handler = checkpoint.ocp.type_handlers.NumpyHandler
  monkeypatch.setattr(handler, "_background_serialize", fail)
  state = make_state(4)
  with pytest.raises(CheckpointError, match="no space left"):
    checkpoints.save(4, state, state.learner, {})
    checkpoints.wait()
  assert checkpoints.steps() == [2, 3]
  monkeypatch.undo()
  assert checkpoints.save(5, state, state.learner, {})
  checkpoints.close()
  assert checkpoints.steps() == [3, 5]


def test_a_step_that_is_already_saved_is_left_as_it_is(tmp_path):
  save_steps(tmp_path, 5)
  checkpoints = Checkpoints(tmp_path)
  _, _, step = checkpoints.restore(ABSTRACT)
  other = make_state(99)
  assert not checkpoints.save(step, other, other.learner, {})
  checkpoints.close()
  assert_same_bits(Checkpoints(tmp_path).restore(ABSTRACT)[0], make_state(5))


def test_a_save_cut_short_is_skipped_with_a_warning_and_cleaned_up(tmp_path):
  save_steps(tmp_path, 1, 2)
  directory = tmp_path / "checkpoints"
  # What a kill leaves behind: Orbax renames the directory only when complete.
  cut = directory / "3.orbax-checkpoint-tmp"
  shutil.copytree(directory / "2", cut)
  (cut / "_CHECKPOINT_METADATA").unlink()
  warnings = []
  checkpoints = Checkpoints(tmp_path, warn=warnings.append)
  state, _, step = checkpoints.restore(ABSTRACT)
  assert step == 2 and len(warnings) == 1 and "step 3" in warnings[0]
  assert cut.exists()
  checkpoints.save(4, state, state.learner, {})
  checkpoints.close()
  assert not cut.exists() and checkpoints.steps() == [2, 4]


def largest_file(directory: pathlib.Path) -> pathlib.Path:
  files = [f for f in directory.rglob("*") if f.is_file() and f.suffix != ".txt"]
  return max(files, key=lambda f: f.stat().st_size)


def flip_a_byte(path: pathlib.Path) -> None:
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 0xFF
  path.write_bytes(data)


def truncate(path: pathlib.Path) -> None:
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("harm", [flip_a_byte, truncate, pathlib.Path.unlink])
@pytest.mark.parametrize("where", ["state", "host", "manifest"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, harm, where):
  save_steps(tmp_path, 1, 2)
  harm(largest_file(tmp_path / "checkpoints/2" / where))
  warnings = []
  checkpoints = Checkpoints(tmp_path, warn=warnings.append)
  state, host, step = checkpoints.restore(ABSTRACT)
  assert (step, host) == (1, {"step": 1})
  assert_same_bits(state, make_state(1))
  assert len(warnings) == 1 and "\n" not in warnings[0]
  # Reaching the same step again replaces the damaged one.
  new = make_state(2)
  checkpoints.save(2, new, new.learner["params"], {"step": 2})
  checkpoints.close()
  assert checkpoints.steps() == [1, 2]
  assert_same_bits(Checkpoints(tmp_path).restore(ABSTRACT)[0], new)


def test_nothing_to_restore(tmp_path):
  with pytest.raises(CheckpointError, match="no complete checkpoint"):
    Checkpoints(tmp_path).restore(ABSTRACT)
  assert not list(tmp_path.iterdir())


def test_misfits_name_the_field(tmp_path):
  save_steps(tmp_path, 1)
  checkpoints = Checkpoints(tmp_path, warn=pytest.fail)
  with pytest.raises(CheckpointError, match=r"replay\.0 has shape \(300, 5\).*7\)"):
    checkpoints.restore(make_state(observation=7))
  state = make_state()
  with pytest.raises(CheckpointError, match="count has dtype uint32, expected int32"):
    checkpoints.restore(state.replace(count=jnp.int32(0)))
  with pytest.raises(CheckpointError, match="key has dtype key<fry>, expected key<rbg"):
    checkpoints.restore(state.replace(key=jax.random.key(0, impl="rbg")))
  more = state.replace(learner={**state.learner, "scale": jnp.ones(())})
  with pytest.raises(CheckpointError, match="learner.scale is expected and not in it"):
    checkpoints.restore(more)
  with pytest.raises(CheckpointError, match=r"replay\.5 is in it and not expected"):
    checkpoints.restore(state.replace(replay=state.replay[:5]))


def test_another_format_version_is_one_sentence(tmp_path, monkeypatch):
  save_steps(tmp_path, 1)
  monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 2)
  with pytest.raises(CheckpointError, match="format version 1.*reads version 2"):
    Checkpoints(tmp_path, warn=pytest.fail).restore(ABSTRACT)


def test_learner_alone_from_run_checkpoint_or_copied_folder(tmp_path):
  save_steps(tmp_path / "run", 1, 2)
  abstract = ABSTRACT.learner["params"]
  step_dir = tmp_path / "run/checkpoints/1"
  assert_same_bits(load_learner(step_dir, abstract), make_state(1).learner["params"])
  newest = load_learner(tmp_path / "run", abstract)
  assert_same_bits(newest, make_state(2).learner["params"])
  for item in ("learner", "manifest"):
    shutil.copytree(step_dir / item, tmp_path / "shared" / item)
  shared = load_learner(tmp_path / "shared", abstract)
  assert_same_bits(shared, make_state(1).learner["params"])
  with pytest.raises(CheckpointError, match="neither a run directory"):
    load_learner(tmp_path, abstract)
  flip_a_byte(largest_file(step_dir / "learner"))
  with pytest.raises(CheckpointError, match="damaged"):
    load_learner(step_dir, abstract)


def test_a_python_number_in_the_state_is_refused(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  with pytest.raises(CheckpointError, match="Field n of the state is a int"):
    checkpoints.save(1, {"n": 3}, {}, {})
  checkpoints.close()


KILLED_WHILE_SAVING = """
import asyncio, os, pathlib, signal, sys, time
import jax.numpy as jnp
from mjx_tdmpc2 import checkpoint

run_dir = pathlib.Path(sys.argv[1])
state = {"x": jnp.arange(1000.0)}
checkpoints = checkpoint.Checkpoints(run_dir)
checkpoints.save(1, state, state, {})
checkpoints.wait()

async def stall(*args, **kwargs):
  await asyncio.sleep(600)

checkpoint.ocp.type_handlers.NumpyHandler._background_serialize = stall
checkpoints.save(2, state, state, {})
while not list((run_dir / "checkpoints").glob("2*")):
  time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save(tmp_path):
  command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path)]
  done = subprocess.run(command, cwd=pathlib.Path(__file__).parents[1], timeout=120)
  assert done.returncode == -signal.SIGKILL
  warnings = []
  checkpoints = Checkpoints(tmp_path, warn=warnings.append)
  state, _, step = checkpoints.restore({"x": jnp.zeros(1000)})
  assert step == 1 and len(warnings) == 1
  np.testing.assert_array_equal(state["x"], np.arange(1000.0))
