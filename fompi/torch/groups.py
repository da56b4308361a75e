"""The Communicator of a group of `torch.distributed`: what `comm=` takes of torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from fompi.base.errors import LaunchError, LayoutError
from fompi.engine.communicator import Communicator
from fompi.mpi import launcher, transport
from fompi.mpi.link import of_members
from fompi.plans.problems import order_of
from fompi.torch import private
from fompi.torch.store import own_connection

_OF_OTHERS: dict[str, tuple[Any, Communicator]] = {}
"""The communicators that stand next to groups of other backends, by the names of the groups."""


def communicator(group: Any = None) -> Communicator:
    """The Communicator of a group of `torch.distributed`. `comm=group` does the same.

        tp = fompi.torch.communicator(mesh["tp"])             # a DeviceMesh of one dimension
        y = fompi.all_gather_matmul(x, w, comm=tp)

    `group` is a ProcessGroup, its name, or a DeviceMesh of one dimension. It may also be anything that `comm=` takes.
    The communicator is that of the group itself, and is closed with it. A group of another backend gets one of its own
    at the first call, which all of its ranks make; if MPI is not running, all ranks of the job.
    Raises LayoutError for a mesh of several dimensions, and LaunchError if torch and MPI number the ranks differently.
    """
    if isinstance(group, str):
        group = private.group_named(group)
    elif hasattr(group, "mesh_dim_names"):
        if group.ndim != 1:
            raise LayoutError(f"a mesh of the dimensions {group.mesh_dim_names} has several groups: choose a dimension")
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        own = private.with_communicator(group)
        return _of_another(group) if own is None else Communicator.of(own.comm)
    return Communicator.of(group)


@contextmanager
def ordered(order: Any, group: Any = None) -> Iterator[None]:
    """In the `with` block, on all ranks, the group adds all terms in this order: "ranks", or `fompi.Canonical(k)`.

        with fompi.torch.ordered("ranks"):
            torch.distributed.all_reduce(x)

    `group`: a ProcessGroup of the backend fompi, or a DeviceMesh of one dimension; None: the default group. It holds
    for all_reduce, reduce, reduce_scatter and what torch makes of them, and for a backward that runs inside. With
    leaves a tensor is the sum of those of its rank. Raises LayoutError for a group of another backend.
    """
    if hasattr(group, "mesh_dim_names"):
        group = group.get_group()
    own = private.with_communicator(dist.group.WORLD if group is None else group)
    if own is None:
        raise LayoutError("fompi.torch.ordered: this group has another backend than fompi")
    before, own.order = own.order, order_of(order)
    try:
        yield
    finally:
        own.order = before


def _of_another(group: Any) -> Communicator:
    kept, made = _OF_OTHERS.get(group.group_name, (None, None))
    if kept is group and made is not None and not made.closed:
        return made
    ranks, here = dist.get_process_group_ranks(group), (dist.get_rank(), dist.get_world_size())
    transport.start_by_store(partial(own_connection, private.store_of_default_group()), *here, launcher.timeout())
    if transport.world() != here:
        raise LaunchError(
            "torch has rank {} of {} here, but MPI has rank {} of {}".format(*here, *transport.world())
            + ": start the program with mpirun, and give torch the ranks of MPI"
        )
    members = of_members(ranks, zlib.crc32(group.group_name.encode()) % 30000)
    made = Communicator(members, f"beside torch {group.group_name}")
    members.Free()
    _OF_OTHERS[group.group_name] = group, made
    return made
