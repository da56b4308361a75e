"""Doors: functions that a lower room calls and an upper room fills in, so that the imports stay straight.

    DOORS.report = of_environment          # the upper room, or `fompi/__init__.py` for what is imported late
    observer = DOORS.report()              # the lower room

This is the only way in which a room calls one that it must not import. docs/inside/design.md lists the doors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fompi.base.errors import StateError


def closed(*args: Any) -> Any:
    raise StateError("this needs parts of fompi that are not loaded: run `import fompi` first")


@dataclass
class Doors:
    """Each field is a function of an upper room."""

    differentiable: Callable[..., Any] = closed
    """(operation, arguments, comm, call_options) -> the result, attached to autograd. `ops` -> `torch`."""

    measure: Callable[..., tuple[str, Any]] = closed
    """(operation, arguments, local, comm) -> the fastest schedule and slices. `ops` -> `tuning`."""

    machine: Callable[[Any, str], Any] = closed
    """(comm, what the ranks compare) -> its Machine, measured now. `planner` -> `tuning`."""

    bind: Callable[..., Any] = closed
    """(operation, arguments, comm, call_options) -> the BoundCall. Inside `ops`: it needs Pending and the executor."""

    prepare: Callable[[], None] = closed
    """Set `traced`, and hide from torch.compile what it must not read. `ops`, `parallel` -> `torch`."""

    traced: Callable[..., Any] = closed
    """(operation or strategy, args, options) -> the result, where torch.compile reads the call. `ops` -> `torch`."""

    strategy_of_torch: Callable[..., Any] = closed
    """(the call of a strategy, its tensors) -> the result, attached to autograd. `parallel` -> `torch`."""

    modes_of_torch: Callable[[], Callable[[], Any]] = closed
    """() -> what makes a context with the modes of torch that this thread has. `parallel` -> `torch`."""

    modes_of_jax: Callable[[], Callable[[], Any]] = closed
    """() -> the same with the modes of JAX. `parallel` -> `jax`."""

    attention_of_torch: Callable[..., Any] = closed
    """(dtype, is it on a device, are values as wide as keys) -> a kernel of attention=. `parallel` -> `torch`."""

    strategy_of_jax: Callable[..., Any] = closed
    """(strategy, its tensors by name) -> the result on tracers of JAX. `parallel` -> `jax`."""

    parts_of_torch: Callable[[Any], Mapping[str, Any]] = closed
    """(module) -> what this rank has of its state, for a checkpoint. `parallel` -> `torch`."""

    report: Callable[[], Any] = closed
    """() -> what notes finished calls, or None (FOMPI_REPORT). `engine` -> `runtime`."""

    store_of_torchrun: Callable[[float], Any] = closed
    """(seconds) -> the store by which the processes of torchrun start MPI. `mpi` -> `torch`."""

    tcp_store: Callable[[str, int, float], Any] = closed
    """(host, port, seconds) -> the TCPStore of torch that listens there. `members` -> `torch`."""

    communicator_of_torch: Callable[[Any], Any] = closed
    """(group) -> the Communicator of a ProcessGroup or DeviceMesh of torch. `engine` -> `torch`."""

    comm: Callable[[], type] = closed
    """() -> `fompi.mpi.Comm`, which loads mpi4py. `mpi` -> `ops`."""

    other_plans: Callable[[Any], Iterable[tuple[str, int, Any]]] = closed
    """(problem) -> (schedule, slices, plan) of every schedule. `runtime` -> `ops`."""

    products: Callable[..., Any] = closed
    """(kernel, reads, writes, their dtypes) -> a product by torch, or None. `backends` -> `torch`."""

    picture: Callable[[Mapping[str, Any]], str] = closed
    """(traces by their titles) -> an SVG file of them. Inside `traces`: what draws a trace reads it."""

    schedule_registered: Callable[[], None] = closed
    """Called when a user has registered a schedule: caches of choices are forgotten. `schedules` -> `planner`."""


DOORS = Doors()
