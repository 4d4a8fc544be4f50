"""The physics layer on a model of a few balls, against C MuJoCo."""

import re

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from envs_mjx.physics import Physics, Stage, load_model

pytestmark = pytest.mark.slow

N_BALLS = 3
_BALL = """
<body name="ball{i}" pos="{i} 0 0.101">
  <joint name="lift{i}" type="slide" axis="0 0 1" damping="0.3"/>
  <geom name="ball{i}" type="sphere" size="0.1" conaffinity="0"/>
  <site name="skin{i}" type="sphere" size="0.12"/>
</body>"""
XML = f"""
<mujoco>
  <option timestep="0.004"><flag energy="enable"/></option>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 1"/>
    {"".join(_BALL.format(i=i) for i in range(N_BALLS))}
  </worldbody>
  <actuator>
    <motor joint="lift0" gear="8" ctrlrange="-1 1" ctrllimited="true"/>
  </actuator>
  <sensor>
    <touch name="touch" site="skin0"/>
    <jointvel name="speed" joint="lift0"/>
    <framepos name="place" objtype="geom" objname="ball0"/>
  </sensor>
</mujoco>"""
N_SUBSTEPS = 5


def _physics(max_contacts=None):
  model = load_model(XML, {}, max_contacts=max_contacts)
  return Physics(
    model, N_SUBSTEPS, stage=Stage.VELOCITY, acceleration_sensors=True
  )


@pytest.fixture(scope="module")
def physics():
  return _physics()


@pytest.fixture(scope="module")
def initial(physics):
  return jax.jit(physics.initial)


@pytest.fixture(scope="module")
def control_step(physics):
  return jax.jit(physics.control_step)


def _c_data(physics, qpos, qvel):
  data = mujoco.MjData(physics.model)
  data.qpos[:], data.qvel[:] = qpos, qvel
  return data


def test_energy_flag_is_cleared(physics):
  assert physics.model.opt.enableflags == 0


def test_readings_after_a_control_step(physics, initial, control_step):
  """Touch is one substep old; speed and place belong to the new state."""
  qpos, qvel = [0.0, 0.0, 0.2], [-0.5, 0.0, 0.0]
  ctrl = jnp.array([-2.5])  # beyond the range: the dynamics clamp it
  state, _ = control_step(initial(jnp.array(qpos), jnp.array(qvel)), ctrl)
  view = jax.jit(physics.view)(state, ctrl, {})

  data = _c_data(physics, qpos, qvel)
  data.ctrl[:] = ctrl
  for _ in range(N_SUBSTEPS):
    mujoco.mj_step(physics.model, data)
  stale = data.sensor("touch").data.copy()
  mujoco.mj_forward(physics.model, data)
  fresh = data.sensor("touch").data
  assert abs(stale - fresh) > 1.0

  np.testing.assert_allclose(state.qpos, data.qpos, atol=1e-6)
  np.testing.assert_allclose(state.qvel, data.qvel, atol=2e-5)
  got = {n: view.sensordata[physics.sensor(n)] for n in ("touch", "speed", "place")}
  np.testing.assert_allclose(got["touch"], stale, rtol=1e-3)
  np.testing.assert_allclose(got["speed"], data.sensor("speed").data, atol=2e-5)
  np.testing.assert_allclose(got["place"], data.sensor("place").data, atol=1e-6)
  assert float(state.time) == pytest.approx(N_SUBSTEPS * 0.004)


def test_readings_at_a_reset_are_fresh(physics, initial):
  qpos = np.array([-0.01, -0.002, 0.1])
  state = initial(jnp.asarray(qpos), jnp.zeros(N_BALLS))
  data = _c_data(physics, qpos, 0.0)
  mujoco.mj_forward(physics.model, data)
  touch = physics.sensor("touch")
  np.testing.assert_allclose(
    state.sensordata[touch], data.sensor("touch").data, rtol=1e-3
  )
  assert data.sensor("touch").data > 1.0


def test_contacts_beyond_the_slots_are_counted():
  """Three balls, two slots: all substeps count while three touch, none while one."""
  tight = _physics(max_contacts=2)
  assert [s.stop - s.start for s in tight.capped_slots] == [2]
  count = jax.jit(lambda q: tight.control_step(tight.initial(q), jnp.zeros(1))[1])
  resting = jnp.full(N_BALLS, -0.002)
  assert int(count(resting)) == N_SUBSTEPS
  assert int(count(resting.at[:2].set(1.0))) == 0


def test_a_model_with_a_slot_for_every_contact_never_overflows(
  physics, initial, control_step
):
  assert physics.capped_slots == []
  assert _physics(max_contacts=N_BALLS).capped_slots == []
  state = initial(jnp.array([-0.002] * N_BALLS), jnp.zeros(N_BALLS))
  assert int(control_step(state, jnp.zeros(1))[1]) == 0


def test_physics_asks_for_full_matmul_precision_whatever_the_caller_set(physics):
  def everything(qpos, ctrl):
    state, _ = physics.control_step(physics.initial(qpos), ctrl)
    return physics.view(state, ctrl, {}).sensordata

  with jax.default_matmul_precision("bfloat16"):
    text = str(jax.make_jaxpr(everything)(jnp.zeros(N_BALLS), jnp.zeros(1)))
  assert text.count("dot_general[") > 10
  asked = set(re.findall(r"precision=(\([^)]*\)|\w+)", text))
  assert asked == {"(Precision.HIGHEST, Precision.HIGHEST)"}
