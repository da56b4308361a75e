"""python -m fompi.lab: hosts with shaped links on this machine, for one MPI job (`fompi.lab.command`).

`python .../fompi/lab/__main__.py` does the same without NumPy and MPI: then the process has one thread, as the kernel
demands of a user who is not root.
"""

import sys
from pathlib import Path
from types import ModuleType

if "fompi" not in sys.modules:  # started as a file: only this room is imported
    room = ModuleType("fompi")
    room.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["fompi"] = room
    del sys.path[0]  # the folder of this file, which has a `values` and a `command`

from fompi.lab.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
