"""The groups of a program that names another backend run on fompi: `python -m fompi.torch PROGRAM`.

So do those of processes that the program starts with a Python of their own: they inherit the variable `FOMPI_TORCH`,
and `register` reads it when torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch.distributed as dist

from fompi.mpi import environment, launcher
from fompi.torch import private

IGNORED = ("backend", "pg_options", "device_id")
"""What a program says about its backend."""

MEETING = ("init_method", "world_size", "rank", "store")
"""What it says about how its processes meet. Where a launcher has started MPI, MPI knows better."""


def is_wanted() -> bool:
    return environment.value("FOMPI_TORCH") == "1"


@cache
def watch_transformers(is_on: Callable[[], bool]) -> None:
    """While `is_on()`, models of transformers compute prompts in halves. Its import takes seconds: not here."""
    name = "transformers.distributed.tensor_parallel"
    private.after_import(name, lambda module: import_module("fompi.torch.transformers").halve(module, is_on))


def swap() -> None:
    """Let `init_process_group` and `new_group` of this process and of its children make groups of fompi."""
    environment.preset("FOMPI_TORCH", "1")
    watch_transformers(is_wanted)
    initialise, make = dist.init_process_group, dist.new_group
    if getattr(initialise, "__module__", "") == __name__:
        return

    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None, *rest: Any, **options: Any
    ) -> Any:
        options |= dict(zip(("world_size", "rank", "store"), rest, strict=False))
        kept = {name: value for name, value in options.items() if name not in IGNORED}
        says_where = kept.get("store") or init_method not in (None, "env://") or "MASTER_ADDR" in os.environ
        if launcher.starts_mpi(os.environ) or not says_where:
            init_method, kept = "fompi://", {name: value for name, value in kept.items() if name not in MEETING}
        return initialise("fompi", init_method, timeout, **kept)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *rest: Any, **options: Any) -> Any:
        kept = {name: value for name, value in options.items() if name not in IGNORED}
        return make(ranks, timeout, "fompi", None, *rest[1:3], **kept)

    swapped = {"init_process_group": (initialise, init_process_group), "new_group": (make, new_group)}
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.distributed")]:
        for name, (old, new) in swapped.items():
            if getattr(module, name, None) is old:
                setattr(module, name, new)
