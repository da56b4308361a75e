"""The order of a call on a GPU: what is enqueued in a stream after `Work.wait` finds the results.

    caller's stream   ... writes x ──begun─────────────────────────follow── reads x ...
    fompi's streams                  └──▶ kernels and messages ──┐      ▲
    the side stream                  └───────────────────────────▶ finish, end

A call may end in the helper thread, whose current stream is not that of the program. So whatever is left to do then,
copies to the tensors of the program, is enqueued in a third stream. A thread that waits for the call lets its own
current stream wait for the end, and does not stop. All memory of the call is kept until the GPU has reached the end.

On the host a call that has ended is done: `HOST`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock
from typing import Any

import torch


class Order:
    """The order of a call on the host."""

    devices: list[Any] | None = None
    """What a future must know: the GPU of its tensors."""

    def inside(self) -> AbstractContextManager[Any]:
        """A context in which the calls of torch are enqueued behind the call."""
        return nullcontext()

    def writing(self) -> AbstractContextManager[list[Any]]:
        """A context for what is left to do when the call ends. What is put in its list is kept as long as needed."""
        return nullcontext([])

    def follow(self) -> None:
        """Let the current stream of the caller wait for the end of the call."""

    def is_done(self) -> bool:
        """True once the GPU has reached the end of the call, which has been enqueued."""
        return True


HOST = Order()

_SIDES: dict[tuple[int, str], Any] = {}
"""The side stream of each GPU."""

_KEPT: deque[tuple[Any, list[Any]]] = deque()
"""The ends of calls that the GPU had not reached when the last call ended, and the memory of these calls."""

_LOCK = RLock()


class OnGpu(Order):
    """The order of a call that begins now, on the GPU `device`. `cuda` is `torch.cuda`."""

    def __init__(self, device: Any, cuda: Any = None):
        self.device, self.devices, self._cuda = device, [device], cuda or torch.cuda
        self._begun, self._end = self._stream().record_event(), None

    def _stream(self) -> Any:
        return self._cuda.current_stream(self.device)

    def _side(self) -> Any:
        key = id(self._cuda), str(self.device)
        if key not in _SIDES:
            _SIDES[key] = self._cuda.Stream(self.device)
        return _SIDES[key]

    def inside(self) -> AbstractContextManager[Any]:
        return self._cuda.stream(self._side())

    @contextmanager
    def writing(self) -> Iterator[list[Any]]:
        kept: list[Any] = []
        side = self._side()
        with _LOCK:
            while _KEPT and _KEPT[0][0].query():
                _KEPT.popleft()
        with self.inside():
            side.wait_event(self._begun)
            try:
                yield kept
            finally:
                self._end = side.record_event()
                with _LOCK:
                    _KEPT.append((self._end, kept))

    def follow(self) -> None:
        if self._end is not None:
            self._stream().wait_event(self._end)

    def is_done(self) -> bool:
        return self._end is None or self._end.query()


def order_of(*tensors: Any) -> Order:
    """The order of a call that has begun on these tensors, or lists of tensors."""
    first = _first(tensors)
    return OnGpu(first.device) if first is not None and first.is_cuda else HOST


def _first(tensors: Any) -> Any:
    """The first tensor in a list of tensors, lists and None. None: there is no tensor."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    parts = tensors if isinstance(tensors, (list, tuple)) else ()
    return next((t for t in map(_first, parts) if t is not None), None)


def drain(device: Any) -> None:
    """Wait until the current stream of `device` has nothing to do. None, and a device that is no GPU: at once."""
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
