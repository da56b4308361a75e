"""The names of mpi4jax on fompi, for programs that were written for it: `import fompi.jax.mpi4jax as mpi4jax`.

The signatures are those of mpi4jax without tokens (from 0.8 on): `y = allreduce(x, op=MPI.SUM, comm=comm)`. `comm` is
a communicator of mpi4py or fompi, by default all ranks. `op` is an operation of mpi4py that MPI defines.

| here                                              | in mpi4jax                                                   |
|---------------------------------------------------|--------------------------------------------------------------|
| the gradient of `allreduce` is dy                 | the same: a loss of replicated values counts once            |
| other ops than SUM, MAX, MIN, PROD gather first   | MPI sums                                                     |
| `scan` gathers first                              | MPI scans                                                    |
| a message with `MPI.ANY_TAG` has the tag 0        | any                                                          |
| `MPI.ANY_SOURCE` is refused                       | any                                                          |
| `sendrecv` has one tag, and one shape and dtype   | two                                                          |
| `sendrecv` has a forward mode (`jax.jvp`)         | it is refused                                                |
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fompi.base.errors import LayoutError, ShapeError
from fompi.engine.communicator import Communicator
from fompi.jax import custom_vjp
from fompi.mpi.transport import start_mpi

__all__ = [
    "allgather", "allreduce", "alltoall", "barrier", "bcast", "gather", "has_cuda_support", "has_sycl_support", "recv",
    "reduce", "scan", "scatter", "send", "sendrecv",
]  # fmt: skip

ours: Any = custom_vjp
"""The operations of `fompi.jax`."""

REDUCED = {"SUM": "sum", "MAX": "max", "MIN": "min", "PROD": "prod"}
"""Operations of MPI that fompi has too."""

FOLDED: dict[str, Any] = {
    "SUM": jnp.add, "MAX": jnp.maximum, "MIN": jnp.minimum, "PROD": jnp.multiply,
    "LAND": jnp.logical_and, "LOR": jnp.logical_or, "LXOR": jnp.logical_xor,
    "BAND": jnp.bitwise_and, "BOR": jnp.bitwise_or, "BXOR": jnp.bitwise_xor,
}  # fmt: skip
"""Operations of MPI on two arrays."""


def allreduce(x: Any, op: Any, *, comm: Any = None) -> Any:
    """y = op over x of all ranks"""
    name = _name(op)
    if name in REDUCED and not _is_bool(x):
        return ours.all_reduce(jnp.asarray(x), op=REDUCED[name], comm=comm, gradient="replicated")
    return _folded(name, allgather(x, comm=comm))


def reduce(x: Any, op: Any, root: int, *, comm: Any = None) -> Any:
    """y = op over x of all ranks if rank == root else x"""
    name, x = _name(op), jnp.asarray(x)
    if name in REDUCED and not _is_bool(x):
        y = ours.reduce(x[None], op=REDUCED[name], root=root, comm=comm)
        return y[0] if _rank(comm) == root else x
    every = gather(x, root, comm=comm)
    return _folded(name, every) if _rank(comm) == root else x


def scan(x: Any, op: Any, *, comm: Any = None) -> Any:
    """y = op over x of the ranks up to this one"""
    return _folded(_name(op), allgather(x, comm=comm)[: _rank(comm) + 1])


def allgather(x: Any, *, comm: Any = None) -> Any:
    """y = stack(x of all ranks)"""
    return ours.all_gather(jnp.asarray(x)[None], comm=comm)


def alltoall(x: Any, *, comm: Any = None) -> Any:
    """y[source] = x[rank] of rank `source`"""
    size = Communicator.of(comm).size
    if jnp.shape(x)[:1] != (size,):
        raise ShapeError(f"alltoall: x must have shape (nproc, ...), here ({size}, ...), not {jnp.shape(x)}")
    return ours.all_to_all(jnp.asarray(x), counts=[1] * size, comm=comm)


def bcast(x: Any, root: int, *, comm: Any = None) -> Any:
    """y = x of rank `root`"""
    return ours.broadcast(jnp.asarray(x), root=root, comm=comm, gradient="replicated")


def gather(x: Any, root: int, *, comm: Any = None) -> Any:
    """y = stack(x of all ranks) if rank == root else x"""
    x = jnp.asarray(x)
    every = ours.gather(x[None], root=root, comm=comm)
    return every if _rank(comm) == root else x


def scatter(x: Any, root: int, *, comm: Any = None) -> Any:
    """y = x[rank] of rank `root`. x has the shape of y on other ranks."""
    x, size = jnp.asarray(x), Communicator.of(comm).size
    if _rank(comm) != root:
        x = x[None]
    elif x.shape[:1] != (size,):
        raise ShapeError(f"Scatter input must have shape (nproc, ...) on the root, here ({size}, ...), not {x.shape}")
    return ours.scatter(x, root=root, comm=comm)[0]


def send(x: Any, dest: int, *, tag: int = 0, comm: Any = None) -> None:
    """Send x to rank `dest`."""
    ours.sendrecv(jnp.asarray(x), dest, None, tag=tag, comm=comm)


def recv(x: Any, source: int | None = None, *, tag: int | None = None, comm: Any = None, status: Any = None) -> Any:
    """y = the array that rank `source` sends. It has the shape and dtype of x."""
    source, tag = _source("recv", source), _tag(tag)
    y = ours.sendrecv(jnp.asarray(x), None, source, tag=tag, comm=comm)
    _note(status, source, tag)
    return y


def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int | None = None,
    comm: Any = None,
    status: Any = None,
) -> Any:
    """send(sendbuf, dest) and recv(recvbuf, source) at once."""
    source, x = _source("sendrecv", source), jnp.asarray(sendbuf)
    expected = jnp.asarray(recvbuf)
    if (x.shape, x.dtype) != (expected.shape, expected.dtype):
        raise ShapeError(
            f"sendrecv: sendbuf is {x.dtype} {x.shape}, recvbuf {expected.dtype} {expected.shape}: they must be alike"
        )
    if recvtag is not None and recvtag not in (sendtag, start_mpi().ANY_TAG):
        raise LayoutError(f"sendrecv: recvtag={recvtag} must be sendtag={sendtag}, or MPI.ANY_TAG")
    y = ours.sendrecv(x, dest, source, tag=sendtag, comm=comm)
    _note(status, source, sendtag)
    return y


def barrier(*, comm: Any = None) -> None:
    """Wait until all ranks are here."""
    jax.block_until_ready(ours.all_reduce(jnp.zeros((), jnp.int32), comm=comm))


def has_cuda_support() -> bool:
    """False: calls in compiled programs run on the CPU."""
    return False


has_sycl_support = has_cuda_support


def _name(op: Any) -> str:
    """The name of an operation that MPI defines. Raises LayoutError for others."""
    MPI = start_mpi()
    for name in FOLDED:
        if op == getattr(MPI, name):
            return name
    raise LayoutError(f"op={op!r} is not one of {', '.join(f'MPI.{name}' for name in FOLDED)}")


def _is_bool(x: Any) -> bool:
    return bool(jnp.asarray(x).dtype == bool)


def _folded(name: str, every: Any) -> Any:
    """The rows of an array, reduced from the first to the last."""
    y = functools.reduce(FOLDED[name], list(every))
    return y.astype(every.dtype)


def _rank(comm: Any) -> int:
    return Communicator.of(comm).rank


def _source(name: str, source: int | None) -> int:
    if source is None or source == start_mpi().ANY_SOURCE:
        raise LayoutError(f"{name}: source= must be a rank: a compiled call cannot receive from any rank")
    return source


def _tag(tag: int | None) -> int:
    return 0 if tag is None or tag == start_mpi().ANY_TAG else tag


def _note(status: Any, source: int, tag: int) -> None:
    """Write the sender to a status of mpi4py."""
    if status is not None:
        status.Set_source(source)
        status.Set_tag(tag)
