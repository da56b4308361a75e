"""Run the scripts of a folder one after the other, in one job of ranks: mpirun -n N python run_blocks.py FOLDER

Each rank writes what a script prints to NAME.RANK.out. The file exists only if the script ended without an exception.
"""

import contextlib
import io
import sys
from pathlib import Path

from fompi.mpi import transport


def main(folder: Path) -> None:
    rank, _ = transport.world()
    for script in sorted(folder.glob("*.py")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(script.read_text(), script.name, "exec"), {"__name__": "__main__"})
        script.with_suffix(f".{rank}.out").write_text(printed.getvalue())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
