"""Run a command that may hang or leave processes behind, and end all of its processes.

A launcher puts its ranks into sessions of their own, so a signal to its process group does not reach them. Therefore
every process of a job carries a mark in its environment, which its children inherit. A process with the mark belongs to
the job, also if its parent has ended. On a system without /proc only the process group is ended.
"""

import contextlib
import itertools
import os
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
    timed_out: bool
    left_behind: tuple[str, ...]  # command lines of processes that still ran GRACE_SECONDS after the job
    memory_left: tuple[str, ...]  # new files in /dev/shm that no process had mapped. A job beside it may have left them

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run(
    command: Sequence[str],
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Finished:
    """Run `command` for at most `seconds`, and end all of its processes. `env` extends the environment."""
    # A job inside a job (a test that calls mpirun) extends the mark, so that the outer job ends it too.
    mark = f"{os.environ.get(MARK, '')}/{os.getpid()}.{next(_numbers)}"
    environment = {**os.environ, **(env or {}), MARK: mark}
    shared_memory = set(_shared_memory())
    # Files, not pipes: a process that is left behind would keep a pipe open, and reading it would not end.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        timed_out = False
        left_behind: tuple[str, ...] = ()
        try:
            process.wait(timeout=seconds)
            elapsed = time.monotonic() - start
            left_behind = _wait_for_all(mark)
        except subprocess.TimeoutExpired:
            timed_out = True
            elapsed = time.monotonic() - start
        finally:  # also after an interrupt
            _end(process, mark)
            memory_left = _unlink(set(_shared_memory()) - shared_memory)
        return Finished(process.returncode, _text(out), _text(err), elapsed, timed_out, left_behind, memory_left)


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


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """SIGTERM comes first: tests print a traceback then, even inside a blocked MPI call."""
    if process.poll() is None or any(_marked(mark)):
        _signal(process, mark, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and (process.poll() is None or any(_marked(mark))):
            time.sleep(0.05)
        while process.poll() is None or any(_marked(mark)):  # again, because a process may have started another
            _signal(process, mark, signal.SIGKILL)
            time.sleep(0.05)
    process.wait()


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
