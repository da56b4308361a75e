"""What fompi is measured against.

| file          | what it holds                                                                              |
|---------------|--------------------------------------------------------------------------------------------|
| `rival.py`    | what rivals share: the operations, and how rows are sliced                                 |
| `messages.py` | requests in flight for the rivals on mpi4py, and a helper thread that tests them           |
| `plain_mpi.py`| mpi4py: blocking, pairwise without overlap, and in slices                                  |
| `exchange.py` | the bare exchange: only the messages of a collective                                       |
| `tcp.py`      | plain TCP streams between the ranks: as fast as the link allows                            |

`tcp.py` imports the standard library only, because `fompi.lab` loads it as a file.
"""
