"""Loads the recordings of the algorithm into this project's types.

A recording is one .npz file NAME_VERSION; VERSION `pe` or `head` names the code it
was made with and so decides the semantics. Sizes are read from the arrays; what
arrays cannot tell (discounts, the clip, the number of elites) goes by NAME.
"""

import dataclasses
import functools
import pathlib

import jax.numpy as jnp
import numpy as np

from mjx_tdmpc2 import math
from mjx_tdmpc2.config import AgentConfig
from mjx_tdmpc2.types import Batch
from mjx_tdmpc2.update import UpdateDraws

_EPISODE_LENGTHS = {"multitask": (500, 100, 1000)}
_KNOWN = {"wide": {"grad_clip_norm": 0.25, "num_elites": 16}}
_NETWORKS = ("encoder", "dynamics", "reward", "termination", "pi")


def files(golden_dir: str, subfolder: str, suffix: str = ".npz") -> list[pathlib.Path]:
  """The recordings of a subfolder in alphabetical order; [] if it is missing."""
  return sorted((pathlib.Path(golden_dir) / subfolder).glob(f"*{suffix}"))


def layer(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
  """A layer from its torch arrays: weight [..., out, in] becomes kernel [in, out]."""
  out = {
      "kernel": np.swapaxes(arrays[f"{name}.weight"], -1, -2),
      "bias": arrays[f"{name}.bias"],
  }
  if f"{name}.ln.weight" in arrays:
    out["ln_scale"] = arrays[f"{name}.ln.weight"]
    out["ln_bias"] = arrays[f"{name}.ln.bias"]
  return out


def network(arrays: dict[str, np.ndarray], name: str):
  """The MLP `name`, a tuple of layers; leading axes of the arrays are kept."""
  count = 0
  while f"{name}.{count}.weight" in arrays:
    count += 1
  return tuple(layer(arrays, f"{name}.{i}") for i in range(count))


def heads(arrays: dict[str, np.ndarray], name: str):
  """A tuple of Nq MLPs from arrays stacked on axis 0."""
  stacked = network(arrays, name)
  num_q = stacked[0]["bias"].shape[0]
  return tuple(
      tuple({k: v[i] for k, v in one.items()} for one in stacked)
      for i in range(num_q)
  )


@dataclasses.dataclass(frozen=True)
class Recording:
  """One file; `arrays` maps full keys to values."""

  name: str
  semantics: str  # "paper" or "head"
  arrays: dict[str, np.ndarray]
  cfg: AgentConfig

  def group(self, prefix: str) -> dict[str, np.ndarray]:
    """Arrays under a prefix such as "init/", by the rest of their keys."""
    return {
        k[len(prefix) :]: v for k, v in self.arrays.items() if k.startswith(prefix)
    }

  def count(self, part: str) -> int:
    """Number of recorded steps of "update" or "plan"."""
    found = {k.split("/")[1] for k in self.arrays if k.startswith(f"{part}/")}
    return sum(name.isdigit() for name in found)

  def params(self, prefix: str = "init/"):
    """(params, target_q) as NumPy pytrees."""
    arrays = self.group(prefix)
    params = {
        name: network(arrays, name)
        for name in _NETWORKS
        if f"{name}.0.weight" in arrays
    }
    params["q"] = heads(arrays, "Qs")
    if "task_emb.weight" in arrays:
      params["task_emb"] = arrays["task_emb.weight"]
    return params, heads(arrays, "target_Qs")

  def update_inputs(self, i: int) -> tuple[Batch, UpdateDraws]:
    """The recorded batch and draws of update i; there is no dropout in them."""
    rec = self.group(f"update/{i}/")
    reward = jnp.asarray(rec["reward"][..., 0])
    terminated = jnp.zeros_like(reward)
    if "terminated" in rec:
      terminated = jnp.asarray(rec["terminated"][..., 0], jnp.float32)
    batch = Batch(
        obs=jnp.asarray(rec["obs"]),
        action=jnp.asarray(rec["action"]),
        reward=reward,
        terminated=terminated,
        task=jnp.asarray(rec["task"], jnp.int32) if "task" in rec else None,
    )
    draws = UpdateDraws(
        td_pi_eps=jnp.asarray(rec["td_pi_eps"]),
        td_pair=jnp.asarray(rec["td_pair"], jnp.int32),
        policy_pi_eps=jnp.asarray(rec["policy_pi_eps"]),
        policy_pair=jnp.asarray(rec["policy_pair"], jnp.int32),
    )
    return batch, draws


def _config(name: str, semantics: str, arrays: dict[str, np.ndarray]) -> AgentConfig:
  kind = name.split("_")[0]
  init = {k[5:]: v for k, v in arrays.items() if k.startswith("init/")}
  encoder = network(init, "encoder")
  settings = dict(
      obs_size=arrays["fwd/obs"].shape[-1],
      action_size=arrays["fwd/action"].shape[-1],
      enc_dim=encoder[0]["bias"].shape[0],
      mlp_dim=init["pi.0.bias"].shape[0],
      latent_dim=encoder[-1]["bias"].shape[0],
      num_enc_layers=len(encoder),
      num_q=init["Qs.0.bias"].shape[0],
      num_bins=init["reward.2.bias"].shape[0],
      dropout=0.0,
      episodic="termination.0.bias" in init,
      batch_size=arrays["update/0/obs"].shape[1],
      horizon=arrays["update/0/action"].shape[0],
      iterations=arrays["plan/0/noise"].shape[0],
      num_pi_trajs=arrays["plan/0/pi_eps"].shape[1],
      num_samples=arrays["plan/0/iter_values"].shape[1],
      discounts=tuple(
          math.discount_heuristic(t) for t in _EPISODE_LENGTHS.get(kind, (500,))
      ),
      entropy_form=semantics,
      q_dropout_form=semantics,
  )
  if "task_emb.weight" in init:
    used = np.abs(arrays["fwd/pi_action"]) > 0  # Masked dims are exactly 0.
    tasks = arrays["fwd/task"]
    settings["task_dim"] = init["task_emb.weight"].shape[1]
    settings["action_dims"] = tuple(
        int(used[tasks == task].any(axis=0).sum())
        for task in range(init["task_emb.weight"].shape[0])
    )
  return AgentConfig(**{**settings, **_KNOWN.get(kind, {})})


@functools.cache
def load(path: pathlib.Path) -> Recording:
  """Reads a recording of algorithm/ (kept in memory: several tests share it)."""
  with np.load(path) as data:
    arrays = {key: data[key] for key in data.files}
  name = path.stem
  semantics = {"pe": "paper", "head": "head"}[name.rsplit("_", 1)[1]]
  return Recording(name, semantics, arrays, _config(name, semantics, arrays))
