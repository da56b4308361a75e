"""Who moves messages while a rank computes: no MPI library can be trusted to do it by itself.

| mode     | while a kernel of ours runs, or the program does something else                              |
|----------|----------------------------------------------------------------------------------------------|
| `helper` | a thread sleeps and polls in turns, and makes sums whose pieces have come (the default)      |
| `native` | the same, but seldom: the library moves messages by itself, as was measured                  |
| `poll`   | nobody: messages move between kernels, and when the program asks                             |

The helper sleeps as long as others poll. With one core for a rank it wakes seldom: each time it takes the core from
the kernel for some microseconds. FOMPI_PROGRESS chooses the mode.
"""

from __future__ import annotations

from threading import Event, Thread
from time import sleep
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fompi.engine import Engine

MODES = ("helper", "native", "poll")
SCARCE_SECONDS, SPARE_SECONDS, NATIVE_SECONDS = 400e-6, 50e-6, 2e-3
"""Between two polls: with one core for a rank, with more, and where the library needs no help."""

LINGER_SECONDS = 0.05
"""For so long the helper stays awake when nothing is in flight."""


def seconds_between_polls(mode: str, cores: float) -> float:
    if mode == "native":
        return NATIVE_SECONDS
    return SPARE_SECONDS if cores >= 2 else SCARCE_SECONDS


class Helper:
    """A thread that drives the engine while nobody else does. `seconds`: how long it sleeps between polls."""

    def __init__(self, engine: Engine, seconds: float):
        self.engine, self.seconds = engine, seconds
        self._awake = self._stopped = False
        self._call = Event()
        self._thread: Thread | None = None

    def wake(self) -> None:
        """Something is in flight that others may have to move."""
        if self._awake or self._stopped:
            return
        self._awake = True
        if self._thread is None:
            self._thread = Thread(target=self._run, name="fompi progress", daemon=True)
            self._thread.start()
        self._call.set()

    def stop(self) -> None:
        """End the thread: MPI is about to be left."""
        self._stopped = True
        self._call.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            self._call.wait()
            self._call.clear()
            self._assist()
            if self._stopped:
                return

    def _assist(self) -> None:
        """Poll until nothing has been in flight for a while."""
        engine, idle = self.engine, 0.0
        seen = engine.polls
        while not self._stopped:
            sleep(self.seconds)
            if engine.idle and not engine.computing:
                idle += self.seconds
                if idle > LINGER_SECONDS:
                    self._awake = False
                    if engine.idle:  # nothing began meanwhile, without waking us
                        return
                    self._awake = True
            else:
                idle = 0.0
                if engine.polls == seen:  # nobody else does
                    while engine.progress(merges_only=engine.computing > 0) and not self._stopped:
                        pass
            seen = engine.polls
