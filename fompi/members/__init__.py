"""Groups whose members come and go, without a launcher: `fompi.members.join()`, and `Membership` with a store.

| file            | what it holds                                                                     |
|-----------------|-----------------------------------------------------------------------------------|
| `epochs.py`     | a Communicator of processes that know each other by handles                       |
| `epoch_log.py`  | what islands did, in lines, by which a run can be repeated                        |
| `membership.py` | how members find the next epoch by a store, and meet in it                        |
| `stores.py`     | what a store does: values by keys; one in memory, and torch's                     |
| `served.py`     | a store in one process, for others                                                |
| `etcd.py`       | a store in etcd                                                                   |
"""

from fompi.members.epochs import handle, join
from fompi.members.membership import Membership, open_store
from fompi.members.served import Server

__all__ = ["Membership", "Server", "handle", "join", "open_store"]
