"""Linux namespaces below one process. They have no names, and nothing of them outlives the process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cluster.values import REFUSED, Refused

NEWNS, NEWUTS, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

GRACE_SECONDS = 5.0
"""How long a job may take to end after each signal."""


class Interrupted(BaseException):
    """A signal asks this process to end: Ctrl-C, SIGTERM, SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def libc(name: str, *arguments: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    try:
        libc("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None)
    except OSError as error:
        raise Refused(f"{target} cannot be mounted ({error.strerror}): in a container use --privileged") from None


def enclose(body: Callable[[], int]) -> int:
    """Call `body` as the first process of new namespaces. Returns its exit status.

    Every process that it starts ends with it, and it ends with this process. The kernel does both, so that even a
    SIGKILL leaves nothing behind.
    """
    user, group = os.getuid(), os.getgid()
    try:
        try:
            libc("unshare", NEWNS | NEWPID | NEWNET | NEWUTS)
        except PermissionError:
            # Not root: the same inside a user namespace, in which this user is root.
            libc("unshare", NEWUSER | NEWNS | NEWPID | NEWNET | NEWUTS)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise Refused(
            f"this kernel does not allow network namespaces ({error.strerror}): run as root, or allow user namespaces "
            "(sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0); in a container: --privileged"
        ) from None
    for number in ENDINGS:
        signal.signal(number, interrupt)
    child = os.fork()
    if not child:
        libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        exit_with(body)
    while True:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256
        except Interrupted as interrupted:
            for number in ENDINGS:
                signal.signal(number, lambda *_: os.kill(child, signal.SIGKILL))  # a second signal
            os.kill(child, interrupted.number)


def interrupt(number: int, _: FrameType | None) -> NoReturn:
    """Raise Interrupted, once: Ctrl-C at a terminal reaches both processes, and the first one passes it on."""
    for ending in ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    raise Interrupted(number)


def exit_with(body: Callable[[], int]) -> NoReturn:
    """Call `body` in a forked process, and end the process with the status that it returns."""
    status = 1
    try:
        status = exit_status(body)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def exit_status(body: Callable[[], int]) -> int:
    """The status that `body` returns. Errors become one line and a status."""
    try:
        return body()
    except Refused as refused:
        log(str(refused))
        return refused.status
    except OSError as error:  # from the kernel: no more namespaces, processes or memory
        log(f"this machine cannot continue: {error}")
        return REFUSED
    except Interrupted as interrupted:
        return 128 + interrupted.number


def log(line: str) -> None:
    """Print to standard error, because standard output belongs to the job."""
    print(f"netlab: {line}", file=sys.stderr, flush=True)


def search_path() -> str:
    """PATH with the folders of ip and tc, which are often not in a user's PATH."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def tool(*command: str, text: str = "", pid: int | None = None) -> None:
    """Run ip or tc in the network namespace of process `pid`, with `text` as standard input."""
    inside = ["nsenter", f"--target={pid}", "--net", "--"] if pid else []
    environment = {**os.environ, "PATH": search_path()}
    done = subprocess.run([*inside, *command], input=text, capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[:1]
        raise Refused(f"{command[0]} fails: {' '.join(reason)}; this kernel needs the modules veth, bridge, sch_tbf")


def end_job(job: subprocess.Popen[Any], number: int) -> str:
    """Ask a job to end, more firmly each time. Returns the rest of its output, if that is a pipe."""
    for kind in (number, signal.SIGTERM, signal.SIGKILL):
        job.send_signal(kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.communicate(timeout=GRACE_SECONDS)[0] or ""
    return ""
