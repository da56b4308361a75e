"""python -m fompi.lab: hosts with shaped links on this machine, for one MPI job (`tools/cluster` of a checkout)."""

import sys

from fompi.cli.tools import run_script

if __name__ == "__main__":
    run_script(["lab", *sys.argv[1:]])
