"""Islands that come and go: `fompi.islands.join`. Each is one process, or all ranks of a job."""

from __future__ import annotations

from typing import Any

import numpy as np

from fompi.engine.communicator import Communicator
from fompi.members.membership import Membership
from fompi.ops.operations import all_gather


class Island(Membership):
    """A `Membership` of all ranks of `comm`: rank r speaks with rank r of the others. Making one is collective."""

    def __init__(self, store: Any, name: str, comm: Any, **options: Any):
        given = Communicator.of(comm).plain
        given.agree(f"the island {name!r} with {sorted(options.items(), key=str)}")
        self._inside = given.split(0, given.rank, "island")
        self.rank, self.size = given.rank, given.size
        super().__init__(store, name, **options)

    def of_all(self, text: str) -> list[str]:
        data = text.encode()
        sizes = np.asarray(all_gather(np.array([len(data)]), comm=self._inside))
        padded = np.zeros((1, max(1, int(sizes.max()))), np.uint8)
        padded[0, : len(data)] = np.frombuffer(data, np.uint8)
        rows = np.asarray(all_gather(padded, comm=self._inside))
        return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def close(self) -> None:
        super().close()
        self._inside.close()


def join(address: Any, *, name: str, comm: Any = None, least: int = 2, **options: Any) -> Membership:
    """This process, or this job, as an island among others: what `DiLoCo` and `OuterSteps` take in place of `comm`.

        with fompi.islands.join("etcd://h1:2379", name="h1") as islands:
            with fompi.torch.DiLoCo(model, optimizer, islands, sync_every=30, delay=1) as outer: ...

    `address`: that of a store (`fompi.members.open_store`). `name`: another one for each island; one that is started
    again takes its old name. `comm`: the ranks of this island, of an MPI job or a torchrun group; None: this process
    alone. All islands have as many ranks.
    `least=2`: so many islands begin. `alone=False`: they wait for each other also when fewer are left; True: those that
    are left go on, with a warning. `wait=None`: seconds after which the others go on without an island that is slow.
    `log=None`: a file for the log of epochs, which the first rank writes. `ttl=5`, `group="fompi"`: of a `Membership`.

    With `comm` it is collective. Raises LaunchError if there is no UCX or the store refuses this process, WaitTimeout
    if the store does not answer, and MismatchError if ranks of this island differ in their arguments. An island with
    another number of ranks than the others has a MismatchError on all its ranks, when it meets them.
    """
    if comm is not None and Communicator.of(comm).size > 1:
        return Island(address, name, comm, least=least, **options)
    return Membership(address, name, least, **options)
