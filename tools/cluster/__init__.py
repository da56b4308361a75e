"""A cluster of hosts with shaped links on one machine: `python -m fompi.lab`, `tools/netlab.py`, `fompi try --hosts 2`.

| file            | what it holds                                                                  |
|-----------------|--------------------------------------------------------------------------------|
| `values.py`     | rates, changes of links and the whole cluster, as values that are checked      |
| `namespaces.py` | Linux namespaces below one process; messages, signals and exit statuses        |
| `cores.py`      | a quota of cores for each host                                                 |
| `hosts.py`      | the hosts and the links between them                                           |
| `relay.py`      | latency and loss: a process that passes frames on, later                       |
| `launcher.py`   | how the launchers of MPICH and Open MPI reach the hosts                        |
| `links.py`      | measures what the links carry, with TCP and with MPI                           |
| `tcp.py`        | plain TCP streams between the hosts: as fast as the links allow                |
| `command.py`    | the command line                                                               |

These files import the standard library only, so that the tool runs in any Python, in one thread (`tools/netlab.py`).
`links.py` also imports mpi4py in the ranks that measure.
"""
