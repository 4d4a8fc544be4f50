"""One physics substep in MJX, with constraint forces solved to float32's limit.

MJX's Newton solver compares costs to choose its steps and to stop. In float32 a cost
of order 100 cannot show improvements below 1e-5, where accelerations are still off by
several hundredths: a body that lies on the floor with many shallow contacts is wrong
by 1e-3 rad/s after a control step. The gradient does not suffer so. After MJX's solver
has found the active constraints, a few full Newton steps, each kept where the gradient
shrinks, finish what the costs cannot see: the largest one-step error of the walker
falls from 1e-3 to 4e-5.

All functions take and return `mjx.Data`, unbatched.
"""

import jax
import jax.numpy as jnp
from mujoco import mjx
from mujoco.mjx._src import solver

_POLISHING_STEPS = 1


def step(model: mjx.Model, data: mjx.Data) -> mjx.Data:
  """Advances one timestep by the model's integrator, Euler or RK4.

  Derived fields of the result belong to the state before the step, as MJX's do; with
  RK4, to the integrator's last stage.
  """
  if model.opt.integrator == mjx.IntegratorType.RK4:
    return _runge_kutta(model, data)
  return mjx.euler(model, forward(model, data))


def _runge_kutta(model: mjx.Model, data: mjx.Data) -> mjx.Data:
  """The classical fourth-order method, for joints whose positions add up.

  `mjx.rungekutta4` has four copies of the dynamics in its program, this has one.
  """
  if model.nq != model.nv or model.na:
    raise ValueError(
      "RK4 is there for models of hinges and slides without activations; this one has "
      f"nq = {model.nq}, nv = {model.nv}, na = {model.na}: use the Euler integrator."
    )
  start, timestep = data, model.opt.timestep

  def stage(carry, tableau):
    data, qvel_sum, qacc_sum = carry
    offset, weight = tableau
    data = forward(
      model,
      data.replace(
        qpos=start.qpos + offset * timestep * data.qvel,
        qvel=start.qvel + offset * timestep * data.qacc,
        time=start.time + offset * timestep,
      ),
    )
    return (data, qvel_sum + weight * data.qvel, qacc_sum + weight * data.qacc), None

  zero = jnp.zeros_like(start.qvel)
  tableau = (jnp.array([0.0, 0.5, 0.5, 1.0]), jnp.array([1.0, 2.0, 2.0, 1.0]) / 6.0)
  (data, qvel, qacc), _ = jax.lax.scan(stage, (data, zero, zero), tableau)
  return data.replace(
    qpos=start.qpos + timestep * qvel,
    qvel=start.qvel + timestep * qacc,
    time=start.time + timestep,
    qacc_warmstart=data.qacc,
  )


def forward(model: mjx.Model, data: mjx.Data) -> mjx.Data:
  """Derives forces, accelerations and acceleration-stage sensors of a state."""
  data = mjx.fwd_position(model, data)
  data = mjx.fwd_velocity(model, data)
  data = mjx.fwd_actuation(model, data)
  data = mjx.fwd_acceleration(model, data)
  if data._impl.efc_J.size == 0:
    data = data.replace(qacc=data.qacc_smooth)
  else:
    data = polish(model, mjx.solve(model, data))
  return mjx.sensor_acc(model, data)


def polish(model: mjx.Model, data: mjx.Data) -> mjx.Data:
  """Improves the accelerations and constraint forces that a solver found.

  Takes full Newton steps; each is kept only where it shrinks the gradient.
  """

  def newton_step(_, best):
    qacc = best.qacc - best.Mgrad
    new = solver.Context.create(model, data.replace(qacc=qacc))
    better = new.grad @ new.grad < best.grad @ best.grad
    return jax.tree.map(lambda x, y: jnp.where(better, x, y), new, best)

  best = jax.lax.fori_loop(
    0, _POLISHING_STEPS, newton_step, solver.Context.create(model, data)
  )
  return data.tree_replace({
    "qacc": best.qacc,
    "qfrc_constraint": best.qfrc_constraint,
    "_impl.efc_force": best.efc_force,
  })
