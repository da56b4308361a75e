"""Run a command that may hang or leave processes behind, and be rid of all of them.

A launcher puts its ranks into sessions of their own, so killing its process group does not reach them.
Every process of a job therefore carries a mark in its environment, which its children inherit: what bears
the mark belongs to the job, whoever its parent is now. (Where there is no /proc only the group is killed.)
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

MARK = "FOMPI_TEST_JOB"
GRACE_SECONDS = 3.0  # for tracebacks after SIGTERM, and for the last processes to leave

_numbers = itertools.count()


@dataclass(frozen=True)
class Finished:
    """How a job ended."""

    returncode: int  # negative: the signal that ended it, as in subprocess
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    left_behind: tuple[str, ...]  # command lines of processes that outlived the job by more than the grace

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
    """Run `command` for at most `seconds`; afterwards nothing of it is alive. `env` is added to ours."""
    # A job inside a job (a test that calls mpirun) extends the mark, so that the outer one ends it too.
    mark = f"{os.environ.get(MARK, '')}/{os.getpid()}.{next(_numbers)}"
    environment = {**os.environ, **(env or {}), MARK: mark}
    shared_memory = set(_shared_memory())
    # Files, not pipes: a process left behind would hold a pipe open, and we would wait for it.
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
            left_behind = _wait_for_the_last(mark)
        except subprocess.TimeoutExpired:
            timed_out = True
            elapsed = time.monotonic() - start
        finally:  # also when we are interrupted ourselves
            _end(process, mark)
            _unlink(set(_shared_memory()) - shared_memory)
        return Finished(process.returncode, _text(out), _text(err), elapsed, timed_out, left_behind)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _marked(mark: str) -> Iterator[int]:
    """The processes of a job and of the jobs inside it."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or somebody else's
            continue
        if any(variable == wanted or variable.startswith(wanted + b"/") for variable in variables):
            yield int(folder.name)


def _wait_for_the_last(mark: str) -> tuple[str, ...]:
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
    """SIGTERM first: tests answer it with their traceback, even inside a blocked MPI call."""
    if process.poll() is None or any(_marked(mark)):
        _signal(process, mark, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and (process.poll() is None or any(_marked(mark))):
            time.sleep(0.05)
        while process.poll() is None or any(_marked(mark)):  # again: one may have been born meanwhile
            _signal(process, mark, signal.SIGKILL)
            time.sleep(0.05)
    process.wait()


def _signal(process: subprocess.Popen[bytes], mark: str, number: signal.Signals) -> None:
    for pid in _marked(mark):
        _kill(os.kill, pid, number)
        _kill(os.kill, pid, signal.SIGCONT)  # a stopped process does not serve SIGTERM
    if process.poll() is None:
        _kill(os.killpg, process.pid, number)


def _kill(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        kill(pid, number)


def _shared_memory() -> Iterator[Path]:
    """Both MPIs leave some megabytes here for every job that is killed; a container may have 64 in all."""
    for pattern in ("mpich_shm_*", "sm_segment.*"):
        yield from Path("/dev/shm").glob(pattern)


def _unlink(segments: set[Path]) -> None:
    """Remove those that no process has mapped: another job may have started while ours ran."""
    for folder in Path("/proc").glob("[0-9]*"):
        if not segments:
            return
        try:
            maps = (folder / "maps").read_text()
        except OSError:
            continue
        segments = {segment for segment in segments if str(segment) not in maps}
    for segment in segments:
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            segment.unlink()
