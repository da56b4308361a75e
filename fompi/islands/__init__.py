"""Islands that train by themselves, exchange outer steps, and come and go: `fompi.islands.join` and `replay`.

    with fompi.islands.join("fompi://h1:7777", name="a", log="a.log") as islands:
        with fompi.torch.DiLoCo(model, optimizer, islands, sync_every=30, delay=1) as outer: ...
    fompi.islands.replay(["a.log"], island)          # the same bits, in one process

| file         | what it holds                                                         |
|--------------|-----------------------------------------------------------------------|
| `island.py`  | an island as a member: one process, or an MPI job of several ranks     |
| `replay.py`  | a run again, from the log of its epochs                               |
"""

from fompi.islands.island import join
from fompi.islands.replay import replay

__all__ = ["join", "replay"]
