"""When things happen: periodic events, the length of one device call, signals."""

import math
import signal


def event_due(vector_step: int, freq: int, num_envs: int) -> bool:
  """Whether a periodic event falls on this vector step.

  It falls on the first vector step at or past each multiple of `freq` agent steps,
  0 included. `freq` 0 switches the event off.
  """
  if freq <= 0:
    return False
  if vector_step == 0:
    return True
  return vector_step * num_envs // freq > (vector_step - 1) * num_envs // freq


def next_event(vector_step: int, freq: int, num_envs: int) -> float:
  """The first vector step after this one on which the event falls."""
  if freq <= 0:
    return math.inf
  multiple = vector_step * num_envs // freq + 1
  return max(vector_step + 1, math.ceil(multiple * freq / num_envs))


class Pace:
  """Chooses how many units of work one device call should do.

  A call should be short enough to stop and to show progress, and long enough that
  starting it costs nothing.
  """

  def __init__(self, call_seconds: float = 2.0):
    self._call_seconds = call_seconds
    self._unit_seconds: float | None = None

  def units(self, limit: int) -> int:
    """Between 1 and `limit`: about one call's worth; 1 before a measurement."""
    if self._unit_seconds is None:
      return 1
    return max(1, min(limit, int(self._call_seconds / self._unit_seconds)))

  def measured(self, units: int, seconds: float) -> None:
    """Tells how long the last call took."""
    self._unit_seconds = max(seconds / units, 1e-6)


class StopSignal:
  """Notes SIGINT and SIGTERM, so that the loop can stop between two device calls.

  Attributes:
    name: the signal's name once one came, else None.
  """

  def __init__(self):
    self.name: str | None = None
    self._previous = {}

  def __enter__(self):
    for number in (signal.SIGINT, signal.SIGTERM):
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_):
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _note(self, number, _frame):
    if self.name is not None:  # A second signal: do not wait for the call to end.
      raise KeyboardInterrupt
    self.name = signal.Signals(number).name
