"""The cores of the hosts: a quota for the processes of each host, in a control group of Linux (cgroup v1 or v2)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cluster.values import Cores, Refused

V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


class HostCores:
    """A control group for each host. They have names in the whole system, so `remove` them when the hosts are gone.

    Groups that a killed process has left are removed by the next one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._is_v1 = (V1 / "cgroup.procs").exists()
        home = V1 if self._is_v1 else V2
        for left in home.glob("netlab-*"):
            if not Path("/proc", left.name.split("-")[1]).exists():
                with suppress(OSError):
                    left.rmdir()
        self._folders = {name: home / f"netlab-{os.getpid()}-{name}" for name in names}
        try:
            if not self._is_v1:
                (V2 / "cgroup.subtree_control").write_text("+cpu")
            for folder in self._folders.values():
                folder.mkdir()
        except OSError as error:
            self.remove()
            raise Refused(f"--cores needs root, and control groups that can be written: {error}") from None

    def gate(self, name: str) -> Path:
        """The file of a host's group: a process that writes 0 into it enters the group, with all that it starts."""
        return self._folders[name] / "cgroup.procs"

    def limit(self, name: str, cores: Cores) -> None:
        """Give a host this quota."""
        quota, period = cores.quota
        steps = [("cpu.max", f"{quota} {period}")]
        if self._is_v1:  # without a quota any period is possible
            steps = [("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", f"{period}"), ("cpu.cfs_quota_us", f"{quota}")]
        for file, text in steps:
            (self._folders[name] / file).write_text(text)

    def remove(self) -> None:
        """Remove the groups."""
        for folder in self._folders.values():
            with suppress(OSError):
                folder.rmdir()
