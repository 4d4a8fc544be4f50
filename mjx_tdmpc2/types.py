"""Types that several modules exchange, and the shape legend of every docstring.

Shape legend:
  n  environments (num_envs)      B  batch of windows, or environments that plan
  H  horizon                      T  episode length in agent steps
  S  observation size             A  action size
  L  latent size                  K  bins of the two-hot distributions
  N  candidate action sequences   P  candidates drawn from the policy prior
  E  elites                       I  planner iterations
  Nq Q heads
Windows are time-major: [H, B, ...].
"""

from typing import NamedTuple

import jax


class Batch(NamedTuple):
  """Windows for one update (spec 2.1).

  obs: f32[H+1, B, S]; action: f32[H, B, A]; reward: f32[H, B];
  terminated: f32[H, B]; task: i32[B], or None with a single task.
  Transition t is (obs[t], action[t], reward[t], terminated[t], obs[t+1]).
  """

  obs: jax.Array
  action: jax.Array
  reward: jax.Array
  terminated: jax.Array
  task: jax.Array | None = None
