"""What fompi is measured against.

| file          | what it holds                                                                              |
|---------------|--------------------------------------------------------------------------------------------|
| `library.py`  | the MPI library's own collectives, and the fused operations by them, without overlap       |
| `exchange.py` | the bare exchange: only the messages of a collective                                       |
| `tcp.py`      | plain TCP streams between the ranks: as fast as the link allows                            |

`tcp.py` imports the standard library only, because `fompi.lab` loads it as a file.
"""
