"""Run a command that may hang or leave processes behind, and end all of its processes.

A launcher puts its ranks into sessions of their own, so a signal to its process group does not reach them. Therefore
every process of a job carries a mark in its environment, which its children inherit. A process with the mark belongs to
the job, also if its parent has ended. On a system without /proc only the process group is ended.
"""

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MARK = "JOB_OF_FOMPI_TESTS"
"""The environment variable that holds the mark."""

GRACE_SECONDS = 3.0
"""How long processes have to print tracebacks after SIGTERM, and to end after the job has ended."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Finished:
    """How a job ended."""

    returncode: int  # negative: the signal that ended it, as in subprocess
    stdout: str
    stderr: str
    seconds: float
    cpu_seconds: float  # of the processes that somebody waited for: not of those that were killed
    timed_out: bool
    left_behind: tuple[str, ...]  # command lines of processes that still ran GRACE_SECONDS after the job
    memory_left: tuple[str, ...]  # new files in /dev/shm that no process had mapped. A job beside it may have left them

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Job:
    """A running command. Whoever starts it calls `end`, whatever happens. `env` extends the environment."""

    def __init__(
        self,
        command: Sequence[str],
        seconds: float,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        # A job inside a job (a test that calls mpirun) extends the mark, so that the outer job ends it too.
        self.mark = f"{os.environ.get(MARK, '')}/{os.getpid()}.{next(_numbers)}"
        self.limit = seconds
        self.shared_memory = set(_shared_memory())
        # Files, not pipes: a process that is left behind would keep a pipe open, and reading it would not end.
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115, `end` closes them
        self.begun, self.cpu_seconds = time.monotonic(), 0.0
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=self.err,
            env={**os.environ, **(env or {}), MARK: self.mark},
            cwd=cwd,
            start_new_session=True,
        )

    def has_ended(self) -> bool:
        if self.process.returncode is None:
            before = _seconds_of_children()
            if self.process.poll() is not None:  # the system counts a child, and its children, when it is waited for
                self.cpu_seconds = _seconds_of_children() - before
        return self.process.returncode is not None

    def is_over(self) -> bool:
        """Whether it has ended, or its time has."""
        return self.has_ended() or time.monotonic() - self.begun > self.limit

    def end(self) -> Finished:
        """End all processes that are left. Those of a command that has ended get GRACE_SECONDS to end by themselves."""
        elapsed, timed_out = time.monotonic() - self.begun, not self.has_ended()
        with self.out, self.err:
            try:
                left_behind = () if timed_out else _wait_for_all(self.mark)
            finally:  # also after an interrupt
                self._kill_all()
                memory_left = _unlink(set(_shared_memory()) - self.shared_memory)
            texts = _text(self.out), _text(self.err)
        code = self.process.returncode
        return Finished(code, *texts, elapsed, self.cpu_seconds, timed_out, left_behind, memory_left)

    def _kill_all(self) -> None:
        """SIGTERM comes first: tests print a traceback then, even inside a blocked MPI call."""
        if self._is_alive():
            _signal(self.process, self.mark, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and self._is_alive():
                time.sleep(0.05)
            while self._is_alive():  # again, because a process may have started another
                _signal(self.process, self.mark, signal.SIGKILL)
                time.sleep(0.05)

    def _is_alive(self) -> bool:
        return not self.has_ended() or any(_marked(self.mark))


def run(
    command: Sequence[str],
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Finished:
    """Run `command` for at most `seconds`, and end all of its processes."""
    job = Job(command, seconds, env=env, cwd=cwd)
    try:
        while not job.is_over():
            time.sleep(0.02)
    finally:
        finished = job.end()
    return finished


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _marked(mark: str) -> Iterator[int]:
    """The processes of a job and of the jobs inside it."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or it belongs to another user
            continue
        if any(variable == wanted or variable.startswith(wanted + b"/") for variable in variables):
            yield int(folder.name)


def _wait_for_all(mark: str) -> tuple[str, ...]:
    """Wait until all processes of the job have ended. Returns those that have not."""
    deadline = time.monotonic() + GRACE_SECONDS
    while pids := list(_marked(mark)):
        if time.monotonic() > deadline:
            return tuple(_command_line(pid) for pid in pids)
        time.sleep(0.05)
    return ()


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return f"process {pid}"


def _signal(process: subprocess.Popen[bytes], mark: str, number: signal.Signals) -> None:
    for pid in _marked(mark):
        _kill(os.kill, pid, number)
        _kill(os.kill, pid, signal.SIGCONT)  # a stopped process does not handle SIGTERM
    if process.poll() is None:
        _kill(os.killpg, process.pid, number)


def _kill(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        kill(pid, number)


def _shared_memory() -> Iterator[Path]:
    """The files of both MPIs in /dev/shm. A job that is killed leaves some megabytes, and a container may have 64."""
    for pattern in ("mpich_shm_*", "sm_segment.*"):
        yield from Path("/dev/shm").glob(pattern)


def _unlink(segments: set[Path]) -> tuple[str, ...]:
    """Remove the files that no process has mapped, and return their names. Another job may have made some of them."""
    for folder in Path("/proc").glob("[0-9]*"):
        if not segments:
            break
        try:
            maps = (folder / "maps").read_text()
        except OSError:
            continue
        segments = {segment for segment in segments if str(segment) not in maps}
    for segment in segments:
        with contextlib.suppress(OSError):  # it is removed already, or it belongs to another user
            segment.unlink()
    return tuple(sorted(map(str, segments)))
