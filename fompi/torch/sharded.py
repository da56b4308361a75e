"""Modules that hold parts of parameters: which part each rank holds, and how all ranks begin with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from torch.nn import init

from fompi.base.call_options import OF_COMMUNICATOR, in_words
from fompi.base.differences import detail
from fompi.base.errors import DtypeError, LayoutError, TensorError
from fompi.base.layout import Replicate, integer, offsets
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import digest
from fompi.parallel.arrays import FLOATS, carrying, enter, in_leaves, on_any_ranks
from fompi.parallel.reshard import reshard
from fompi.parallel.shares import dealt
from fompi.plans.boxes import Box, Boxes


@dataclass(frozen=True)
class PartLayout:
    """Which part of a full parameter each rank holds: the runs `runs[rank]` of dimension `dim`, one after the other.

    A `dim` of None: every rank holds all of it.
    """

    shape: tuple[int, ...]  # of the full parameter
    dim: int | None = None
    runs: Sequence[Sequence[range]] = ()

    def shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """A copy of the part of a rank."""
        if self.dim is None:
            return full.clone(memory_format=torch.contiguous_format)
        parts = [full.narrow(self.dim, run.start, len(run)) for run in self.runs[rank]]
        return torch.cat(parts, self.dim).contiguous()

    def unshard(self, part: torch.Tensor, comm: Communicator) -> torch.Tensor:
        """The full parameter, from the part of this rank. Collective."""
        if self.dim is None:
            return part.clone()
        held = Boxes(self.shape, tuple(tuple(box for _, box in self.placed(rank)) for rank in range(comm.size)))
        runs = [part.detach().narrow(self.dim, here.offset[self.dim], here.shape[self.dim])
                for here, _ in self.placed(comm.rank)]  # fmt: skip
        flat = runs[0] if len(runs) == 1 else torch.cat([part.new_zeros(0), *(each.reshape(-1) for each in runs)])
        full: torch.Tensor = reshard(flat, held, Replicate(), comm=comm)
        return full

    def placed(self, rank: int) -> list[tuple[Box, Box]]:
        """The boxes in the part of a rank, and which boxes of the full parameter they are."""
        local, at, found = self.shape_on(rank), 0, []
        for run in self.runs[rank] if self.dim is not None else [range(1)]:
            shape = tuple(len(run) if i == self.dim else n for i, n in enumerate(local))
            begins = (tuple(n if i == self.dim else 0 for i in range(len(local))) for n in (at, run.start))
            found.append(tuple(Box(begin, shape) for begin in begins))
            at += len(run)
        return found  # type: ignore[return-value]

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """The shape of the part of a rank."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] = sum(map(len, self.runs[rank]))
        return tuple(shape)

    def squares(self, part: torch.Tensor, rank: int) -> torch.Tensor:
        """The squares of a part, in float64, without what an earlier rank holds."""
        if self.dim is None:
            return part.double().square() if rank == 0 else part.new_zeros(0, dtype=torch.float64)
        return part.double().square().movedim(self.dim, -1)[..., self.holders(rank, self.runs[:rank]) == 0]

    def holders(self, rank: int, among: Sequence[Sequence[range]] | None = None) -> torch.Tensor:
        """How many ranks hold each index of dimension `dim` that `rank` has. `among`: the runs of those ranks."""
        assert self.dim is not None
        counts = torch.zeros(self.shape[self.dim], dtype=torch.float64)
        for run in (run for runs in (self.runs if among is None else among) for run in runs):
            counts[run.start : run.stop] += 1
        return torch.cat([counts[run.start : run.stop] for run in self.runs[rank]])


def runs_of(counts: Sequence[int], copies: int = 1) -> list[list[range]]:
    """Consecutive runs of such lengths, in each of `copies` equal parts of a dimension."""
    ends = offsets(counts)
    return [[range(i * ends[-1] + a, i * ends[-1] + b) for i in range(copies)] for a, b in pairwise(ends)]


class Sharded(torch.nn.Module):
    """A module that holds parts of parameters: `layouts[name]` says which.

    `factory` are the device and the dtype of its parameters. It prints its `arguments` and its parts. `counts` are the
    units that each rank has, where it deals some.
    """

    def __init__(
        self,
        comm: Communicator,
        factory: dict[str, Any],
        arguments: Mapping[str, Any] | None = None,
        counts: tuple[int, ...] = (),
    ):
        super().__init__()
        self.comm, self.factory, self.arguments, self.counts = comm, factory, dict(arguments or {}), counts
        self.layouts: dict[str, PartLayout] = {}

    def weights(self, **layouts: PartLayout) -> Sharded:
        """A module for linear layers without bias: `weight`, or several names."""
        made = Sharded(self.comm, self.factory)
        for name, layout in layouts.items():
            made.draw(name, layout, fill_linear)
        return made

    def again(self, comm: Any, shares: Any) -> Sharded:
        """The same module on the ranks of `comm`, by these shares, on the device meta. Collective."""
        how = {name: value for name, value in self.arguments.items() if name != "shares"} | on_any_ranks(self.comm.how)
        how |= {"device": "meta", "dtype": self.factory["dtype"], "comm": comm}
        kind: Any = type(self)
        made: Sharded = kind(**how, **({"shares": shares} if self.counts else {}))
        return made

    def draw(self, name: str, layout: PartLayout, fill: Callable[[torch.Tensor], Any]) -> None:
        """Draw the full parameter, and keep the part of this rank. All ranks draw the same numbers."""
        full = torch.empty(layout.shape, **self.factory)
        if not full.is_meta:
            with torch.no_grad():
                fill(full)
        self.layouts[name] = layout
        self.register_parameter(name, torch.nn.Parameter(layout.shard(full, self.comm.rank)))

    def extra_repr(self) -> str:
        words = [f"{name}={value}" for name, value in self.arguments.items()]
        for name, layout in self.layouts.items():
            here = layout.shape_on(self.comm.rank)
            words.append(f"{name}: {here}" + (f" of {layout.shape}" if layout.dim is not None else ""))
        if self.arguments:
            words.append(f"rank {self.comm.rank} of {self.comm.size}{in_words(self.comm.how)}")
        return ", ".join(words)


def fill_linear(weight: torch.Tensor) -> None:
    """The weights of one `torch.nn.Linear`, or of several that are stacked."""
    for w in weight if weight.dim() == 3 else [weight]:
        init.kaiming_uniform_(w, a=sqrt(5))


FACTORY = ("device", "dtype")
"""The keywords of every module of torch."""


def enter_module(
    name: str,
    comm: Any,
    sizes: dict[str, Any],
    options: dict[str, Any],
    how: dict[str, Any],
    check: Callable[[Communicator], None] = lambda comm: None,
    deals: tuple[str, int, int] | None = None,
) -> tuple[Communicator, dict[str, Any], dict[str, Any], tuple[int, ...]]:
    """All ranks make the module `name` with the same arguments and the same random numbers, or all raise.

    `how` are the device and the dtype, `shares` where the module `deals` units (their kind, their number, and in how
    many equal parts), and the keywords of its calls, which the communicator carries from then on. `check` looks at
    that. Returns what `Sharded` takes.
    """
    factory = {key: how.pop(key, None) for key in FACTORY}
    arguments, shares = sizes | options, how.pop("shares", None) if deals else None

    def agreed(comm: Communicator) -> tuple[str, int, tuple[Communicator, tuple[int, ...]]]:
        for key, n in sizes.items():
            if (integer(n) or 0) < 1:
                raise LayoutError(f"{key}={n!r} must be an integer > 0")
        empty = torch.empty(0, **factory)
        if (dtype := str(empty.dtype).removeprefix("torch.")) not in FLOATS:
            raise DtypeError(f"dtype={empty.dtype} must be one of {', '.join(FLOATS)}")
        if empty.device.type not in ("cpu", "cuda", "meta"):
            raise TensorError(f"device={empty.device} must be the CPU or a GPU of CUDA")
        carrier = carrying(name, comm, how, [dtype], [*arguments, "shares", *FACTORY, *OF_COMMUNICATOR])
        counts = dealt(shares, deals[0], deals[1] // deals[2], comm.size) if deals else ()
        if shares is not None:
            carrier, arguments["shares"] = in_leaves(carrier, counts), [*counts]
        check(carrier)
        words = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + in_words(carrier.how)
        if empty.device.type != "meta":
            numbers = torch.get_rng_state() if empty.device.type == "cpu" else torch.cuda.get_rng_state(empty.device)
            state = digest(numbers.numpy().tobytes().hex())
            words += detail("the random state of torch (call torch.manual_seed alike on all ranks)", "", state)
        return f"{words}, {dtype}", 0, (carrier, counts)

    carrier, counts = enter(name, comm, agreed)[1]
    return carrier, factory, arguments, counts
