"""Groups whose members come and go, without a launcher: `fompi.members.handle()` and `fompi.members.join()`.

| file        | what it holds                                                                     |
|-------------|-----------------------------------------------------------------------------------|
| `epochs.py` | a Communicator of processes that know each other by handles                       |
| `stores.py` | where they find each other's handles: torch's store, etcd, or one in a process    |
"""

from fompi.members.epochs import handle, join

__all__ = ["handle", "join"]
