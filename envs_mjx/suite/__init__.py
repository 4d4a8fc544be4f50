"""One module a domain; each offers `TASKS`, its task factories by registry name."""

import contextlib
import io
import warnings

# Both packages report, on import, parts that nothing here uses: MJX its Warp backend,
# dm_control its windows.
with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
  warnings.simplefilter("ignore")
  import dm_control.suite  # noqa: F401
  import mujoco.mjx  # noqa: F401
