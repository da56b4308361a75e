"""A cluster of hosts on one machine: python tools/netlab.py run --hosts 4 --rate 1gbit -- python program.py

It is `python -m fompi.lab`, in any Python (`fompi/lab/command.py` says what it does).
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / "fompi" / "lab" / "__main__.py"), run_name="__main__")
