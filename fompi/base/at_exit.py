"""What runs when this process ends: also in a child that `multiprocessing` has forked, which calls no `atexit`."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable


def _is_child() -> bool:
    """True if `multiprocessing` has started this process, which has loaded it then."""
    loaded = sys.modules.get("multiprocessing")
    return loaded is not None and loaded.parent_process() is not None


def at_exit(function: Callable[[], object]) -> None:
    """Call `function()` once, when this process ends. Those that are registered later are called first."""
    called = False

    def once() -> None:
        nonlocal called
        if not called:
            called = True
            function()

    atexit.register(once)
    if _is_child():
        from multiprocessing.util import Finalize

        Finalize(None, once, exitpriority=0)


def failure() -> BaseException | None:
    """The error by which a child of `multiprocessing` ends. None: it ends normally, or it is no such child.

    What runs at its end runs before Python prints that error, and before the parent learns of it.
    """
    error = sys.exception() if _is_child() else None
    return None if isinstance(error, SystemExit) and not error.code else error
