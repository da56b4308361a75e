"""A cluster of hosts on one machine: python tools/netlab.py run --hosts 4 --rate 1gbit -- python program.py

It is `python -m fompi.lab`, without fompi, NumPy and MPI, in any Python: then the process has one thread, as the kernel
demands of a user who is not root. `tools/cluster/command.py` says what it does.
"""

import sys

from cluster.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
