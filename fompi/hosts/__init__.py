"""Plain machines that ssh reaches: `fompi up h0 h1 -- python train.py`.

| file          | what it holds                                                                                  |
|---------------|------------------------------------------------------------------------------------------------|
| `agent.py`    | what runs on each host while it is looked at: the standard library only, sent over ssh           |
| `remote.py`   | an agent, seen from here: requests with deadlines, and errors as one line with a remedy          |
| `networks.py` | pure: which networks the hosts share, which one is the best, and what is wrong with the others   |
| `start.py`    | pure: hostfile, environment variables, machine file and the command line of mpirun               |
"""
