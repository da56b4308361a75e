"""The error after which a device is of no more use: which operation was the reason, and whether the program knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fompi.base.errors import DeviceError


class OutOfMemory(DeviceError):
    """A device has no more memory. `free` is how many bytes it has left."""

    def __init__(self, text: str, free: int):
        super().__init__(text)
        self.free = free


class Failing:
    """What all devices do after a kernel has failed: they refuse everything.

    A kernel fails some time after its launch. So the error names the operation that was the oldest in flight, in each
    stream: kernels of a stream run in order.
    """

    fault: Any = None
    """What has failed, as an error or in words. None: nothing."""
    on_fault: Callable[[], None]
    """Calls `blame` for the oldest operation in flight of each stream (`fompi.engine.in_flight.InFlight.blame`)."""
    _is_told = False

    def __init__(self) -> None:
        self.on_fault = nothing
        self._blamed: dict[str, str] = {}

    def in_words_of_fault(self) -> str:
        return str(self.fault)

    def failed(self) -> DeviceError:
        """The error to raise for what has failed."""
        if not self._blamed:
            self.on_fault()
        which = " or by ".join(self._blamed.values())
        error = DeviceError(self.in_words_of_fault() + (f". It was launched by {which}" if which else ""))
        error.__cause__ = self.fault if isinstance(self.fault, BaseException) else None
        return error

    def check(self) -> None:
        """Raise the error of the kernel that has failed on this device."""
        if self.fault is not None:
            raise self.failed()

    def check_for_program(self) -> None:
        """As `check`, where the program gets the error."""
        if self.fault is not None:
            self._is_told = True
            raise self.failed()

    def told(self) -> None:
        """The program gets the error of this device, if it has one, from the call that has failed."""
        self._is_told = self._is_told or self.fault is not None

    def tell(self) -> None:
        """Raise the error of this device unless the program has got it already."""
        if not self._is_told:
            self.check_for_program()

    def blame(self, lane: str, operation: str) -> None:
        """`operation` was the oldest in flight in the stream of this lane when the device failed."""
        if self.fault is not None and self.may_have_failed(lane):
            self._blamed.setdefault(lane, operation)

    def may_have_failed(self, lane: str) -> bool:
        """False if it is known that the kernel ran in another stream than that of this lane."""
        return True


def nothing() -> None:
    """Does nothing, where a device has nothing to note."""
