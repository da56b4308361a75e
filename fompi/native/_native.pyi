from typing import Any

OP_NBYTES: int

def kernel(kernel: int, dtype: int, divisor: int, flags: int, a: int, b: int, c: int, count: int, /) -> None: ...
def product(
    is_wide: bool,
    adds: bool,
    sizes: tuple[int, int, int, int],
    x: tuple[int, int, int],
    w: tuple[int, int, int],
    bias: int,
    y: tuple[int, int],
    scratch: int,
    /,
) -> None: ...
def product_scratch(is_wide: bool, sizes: tuple[int, int, int, int], /) -> int: ...
def xla_handler(run: Any, major: int, minor: int, /) -> int: ...

class Library:
    def __init__(
        self,
        isend: int,
        issend: int,
        irecv: int,
        test: int,
        testsome: int,
        byte: int,
        request_nbytes: int,
        pace: tuple[int, int, int, float, float],
        /,
    ) -> None: ...
    is_watched: int
    has_thread: int
    news: int
    def poll(self) -> int: ...
    def help(self, least: float, most: float, /) -> bool: ...
    def stop(self) -> None: ...
    def rest(self, seconds: float, /) -> None: ...
    def wake(self) -> None: ...

class Call:
    started: float
    moved_at: float
    unfinished: int
    disagrees: int
    has_kernels: int
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
        is_long: bool,
        forwards: bool,
        /,
    ) -> None: ...
    def place(self, addresses: Any, /) -> None: ...
    def run(self, tag: int, seconds: float, stall: float, held: Any = ..., /) -> int: ...
    def release(self, ops: Any, /) -> None: ...
    def take(self, merges_only: bool, /) -> int: ...
    def ran(self, op: int, begun: float, /) -> int: ...
    def launched(self, op: int, begun: float, due: float, /) -> int: ...
    def form(self, given: Any, n: int, nbytes: int, /) -> None: ...
    def run_on(self, tag: int, seconds: float, stall: float, stamp: int, addresses: tuple[int, ...], /) -> int: ...
    def drive(self, seconds: float, stall: float, /) -> int: ...
    def has_ended(self, op: int, /) -> bool: ...
    def times(self) -> bytes: ...
    def export(self) -> tuple[bytes, bytes, list[tuple[int, int]]]: ...
