"""`python tools/check --run`: schedules of other systems, run as plans."""

from __future__ import annotations

import msccl_schedules
import pytest

from check_files import main

pytestmark = pytest.mark.ranks(mpich=[2, 4], openmpi=[3])


def test_run(world, comm, tmp_path, capsys):
    files = []
    for name, written in msccl_schedules.ALL.items():
        path = tmp_path / f"{name}.xml"
        path.write_text(written(world.size))
        files.append(str(path))
    assert main([*files, "--run", "--nbytes", "5000"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("run: right") == (len(msccl_schedules.ALL) if world.rank == 0 else 0), printed
    wrong = tmp_path / "wrong.xml"
    wrong.write_text(msccl_schedules.ring_all_reduce(world.size).replace('type="rrcs"', 'type="rcs"', 1))
    assert main([str(wrong), "--run"]) == 1
    assert ("wrong: all_reduce" in capsys.readouterr().out) == (world.rank == 0)
    comm.Barrier()
