"""Stop: all ranks end in the same step after a signal of the batch system."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.mpi import environment


class Stop:
    """A signal was sent to some rank: `stop.agreed(comm)` is True on all ranks in the same step.

        stop = fompi.Stop()  # SIGUSR1; fompi.Stop(signal.SIGUSR1, signal.SIGTERM) listens to both
        for step in range(steps):
            train(step)
            if stop.agreed(comm):
                save(step)
                break

    `sbatch --signal=USR1@120` sends the signal to every rank 120 s before the time limit, but not at the same moment.
    `agreed` is collective, and costs as much as a small all-reduce. Once it is True, the ranks ignore the signals: a
    late one would end a rank that has already left. Rank 0 then makes the file that FOMPI_AGAIN names, if it is set. A
    job script reads it as "start me again" (`fompi slurm --resume`). It must be made in the main thread.
    """

    def __init__(self, *signals: signal.Signals):
        self.requested = False
        self._handlers: dict[signal.Signals, Any] = {}
        for number in signals or (signal.SIGUSR1,):
            self._handlers[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def agreed(self, comm: Any = None) -> bool:
        """True if a signal has reached any rank. Collective."""
        communicator = Communicator.of(comm)
        if not any(agree(communicator, "Stop.agreed", value=int(self.requested))):
            return False
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        again = environment.value("FOMPI_AGAIN")
        if again and communicator.rank == 0:
            Path(again).touch()
        return True

    def close(self) -> None:
        """Give the signals back to the handlers that they had."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
