"""A short measurement that tells how long a run will take, before it starts.

On a machine without an accelerator the paper's setting takes days. A user should
learn that within two minutes and from this machine's own speed, not after the first
evaluation.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mjx_tdmpc2 import planner, report
from mjx_tdmpc2.config import Resolved
from mjx_tdmpc2.types import Batch
from mjx_tdmpc2.update import draw_update, init_learner, update

# Longer runs than this get the hint at the preset for CPUs.
_LONG_RUN_HOURS = 6.0
# Runs below this many operations take well under an hour on any CPU: not worth the
# probe's compilation.
_SHORT_RUN_OPERATIONS = 1e15


def worthwhile(config: Resolved) -> bool:
  """Whether the run may be long enough to be measured first."""
  agent = config.agent
  shapes = jax.eval_shape(lambda: init_learner(agent, jax.random.key(0)).params)
  size = {
    name: sum(x.size for x in jax.tree.leaves(part)) for name, part in shapes.items()
  }
  head = size["q"] / agent.num_q
  plan = agent.horizon * (size["dynamics"] + size["reward"]) + size["pi"] + 2 * head
  plan *= 2 * agent.num_samples * agent.iterations * agent.mpc
  update = 6 * agent.batch_size * agent.horizon * sum(size.values())
  per_step = config.num_envs * plan + config.updates_per_step * update
  return config.total_vector_steps * per_step > _SHORT_RUN_OPERATIONS


def estimate(config: Resolved, say: Callable[[str], None]) -> str:
  """One or two sentences: measured speed and what it means for this run.

  One chunk of plans and two updates are timed; physics is left out, which on a CPU
  is a small part at the paper's model sizes.

  Args:
    config: the run.
    say: takes progress messages.
  """
  with report.timed("speed probe", say):
    plan_seconds = _plan_seconds(config)
    update_seconds = _update_seconds(config)
  n = config.num_envs
  step_seconds = n * plan_seconds + config.updates_per_step * update_seconds
  left = config.total_vector_steps - config.seed_vector_steps
  hours = (left * step_seconds + config.burst_updates * update_seconds) / 3600
  text = (
    f"Measured here: {plan_seconds * 1e3:.1f} ms a planned action, "
    f"{update_seconds * 1e3:.1f} ms an update: about {step_seconds:.2g} s a vector "
    f"step of {n} environments, {_duration(hours)} for the whole run without "
    "evaluations and physics."
  )
  if hours > _LONG_RUN_HOURS:
    text += (
      " This machine has no accelerator in use; configs/quickstart.yaml is the "
      "preset whose sizes suit a CPU. Going on as asked."
    )
  return text


def _plan_seconds(config: Resolved) -> float:
  """Seconds a decision, when one chunk of environments plans."""
  agent = config.agent
  chunk = min(agent.plan_chunk or config.num_envs, config.num_envs)
  params = init_learner(agent, jax.random.key(0)).params

  def plan(key):
    with jax.default_matmul_precision(config.matmul_precision):
      return planner.act(
        agent,
        params,
        jnp.zeros((chunk, agent.horizon, agent.action_size)),
        jnp.zeros((chunk, agent.obs_size)),
        jnp.ones(chunk, bool),
        key,
        eval_mode=False,
      )

  return _best_of(jax.jit(plan), 2) / chunk


def _update_seconds(config: Resolved) -> float:
  """Seconds an update, when several run in one call."""
  agent, count = config.agent, 2
  rows = (agent.horizon, agent.batch_size)
  batch = Batch(
    obs=jnp.zeros((rows[0] + 1, rows[1], agent.obs_size)),
    action=jnp.zeros((*rows, agent.action_size)),
    reward=jnp.zeros(rows),
    terminated=jnp.zeros(rows),
  )

  def updates(key):
    learner = init_learner(agent, key)

    def body(i, learner):
      draws = draw_update(agent, jax.random.fold_in(key, i), rows[1])
      return update(agent, learner, batch, draws)[0]

    with jax.default_matmul_precision(config.matmul_precision):
      return jax.lax.fori_loop(0, count, body, learner)

  return _best_of(jax.jit(updates), 1) / count


def _best_of(fn: Callable, repeats: int) -> float:
  """Least seconds of some calls, after one that compiles."""
  key = jax.random.key(0)
  jax.block_until_ready(fn(key))
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(fn(key))
    seconds.append(time.perf_counter() - start)
  return min(seconds)


def _duration(hours: float) -> str:
  if hours < 1:
    return f"{hours * 60:.0f} minutes"
  return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
