from typing import Any

OP_NBYTES: int

def kernel(kernel: int, dtype: int, divisor: int, flags: int, a: int, b: int, c: int, count: int, /) -> None: ...

class Library:
    def __init__(
        self, isend: int, issend: int, irecv: int, test: int, testsome: int, byte: int, request_nbytes: int, /
    ) -> None: ...
    def poll(self) -> int: ...

class Call:
    started: float
    moved_at: float
    unfinished: int
    disagrees: int
    error: int
    state: int
    def __init__(
        self,
        library: Library,
        ops: Any,
        start_at: Any,
        start_to: Any,
        done_at: Any,
        done_to: Any,
        blockers: Any,
        first: Any,
        nbytes: Any,
        comm: int,
        is_small: bool,
        spins: int,
        /,
    ) -> None: ...
    def place(self, addresses: Any, /) -> None: ...
    def run(self, tag: int, seconds: float, stall: float, /) -> int: ...
    def form(self, given: Any, n: int, nbytes: int, /) -> None: ...
    def run_on(self, tag: int, seconds: float, stall: float, stamp: int, addresses: tuple[int, ...], /) -> int: ...
    def drive(self, seconds: float, stall: float, /) -> int: ...
    def has_ended(self, op: int, /) -> bool: ...
    def times(self) -> bytes: ...
    def export(self) -> tuple[bytes, bytes, list[tuple[int, int]]]: ...
