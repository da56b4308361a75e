"""An island as a member of a group: one process, or all ranks of a Communicator."""

from __future__ import annotations

from typing import Any

import numpy as np

from fompi.engine.communicator import Communicator
from fompi.members.membership import Membership
from fompi.ops.operations import all_gather


class IslandRanks:
    """The ranks of an island, which say texts to each other."""

    def __init__(self, comm: Communicator):
        self._comm = comm.split(0, comm.rank, "island")
        self.rank, self.size = comm.rank, comm.size

    def told(self, text: str) -> str:
        """What the first rank says, on all ranks."""
        return self.of_all("" if self.rank else text)[0]

    def of_all(self, text: str) -> list[str]:
        """What each rank says."""
        data = text.encode()
        sizes = np.asarray(all_gather(np.array([len(data)]), comm=self._comm))
        padded = np.zeros((1, max(1, int(sizes.max()))), np.uint8)
        padded[0, : len(data)] = np.frombuffer(data, np.uint8)
        rows = np.asarray(all_gather(padded, comm=self._comm))
        return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def close(self) -> None:
        self._comm.close()


class Island(Membership):
    """A `Membership` of all ranks of `comm`: rank r speaks with rank r of the others. Making one is collective."""

    def __init__(self, store: Any, name: str, comm: Any, **options: Any):
        comm = Communicator.of(comm).plain
        comm.agree(f"the island {name!r} with {sorted(options.items(), key=str)}")
        self.ranks = IslandRanks(comm)
        super().__init__(store, name, **options)


def join(address: Any, *, name: str, comm: Any = None, least: int = 2, **options: Any) -> Membership:
    """This process, or this job, as an island among others: what `DiLoCo` and `OuterSteps` take in place of `comm`.

        with fompi.islands.join("etcd://h1:2379", name="h1") as islands:
            with fompi.torch.DiLoCo(model, optimizer, islands, sync_every=30, delay=1) as outer: ...

    `address`: that of a store (`fompi.members.open_store`). `name`: another one for each island; one that is started
    again takes its old name. `comm`: the ranks of this island, of an MPI job or a torchrun group; None: this process
    alone. All islands have as many ranks, and rank r exchanges with rank r of the others.
    `least=2`: so many islands begin. `alone=False`: they wait for each other, too, when fewer are left; True: those
    that are left go on, and say so in the log of fompi.
    `wait=None`: seconds after which the others go on without an island that is slow. `log=None`: a file for the log of
    epochs (`fompi.islands.replay`), which the first rank writes. `ttl=5`, `group="fompi"`: as `Membership` has them.

    With `comm` it is collective. Raises LaunchError if there is no UCX or the store refuses this process, WaitTimeout
    if the store does not answer, and MismatchError if ranks of this island differ in their arguments. An island with
    another number of ranks has a MismatchError on all its ranks when it meets the others.
    """
    if comm is not None and Communicator.of(comm).size > 1:
        return Island(address, name, comm, least=least, **options)
    return Membership(address, name, least, **options)
