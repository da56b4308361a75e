"""A host, seen from here: an agent that ssh starts there, requests with deadlines, and errors with a remedy.

    with Remote("h1", ("ssh",)) as host:
        host.ask("facts").result(timeout=10)

The source of the agent goes through the standard input of ssh, so nothing is installed on the host. The agent ends
when that input ends: also if this process is killed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from fompi.base.errors import LaunchError

CONNECT_SECONDS, ANSWER_SECONDS, END_SECONDS = 6, 12.0, 1.0
"""The time for a connection of ssh, for an answer of the agent, and for its end."""

QUIETLY = ("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ServerAliveInterval=3",
           "-o", "LogLevel=ERROR")  # fmt: skip
"""Options of ssh: no terminal, no question, which nobody would answer, and no banner, which is no error."""

BEGIN = "import sys; sys.path[:] = filter(None, sys.path); exec(eval(sys.stdin.readline()))"
"""The agent's source is the first line of its input. It imports nothing from the folder in which it starts."""


class HostError(LaunchError):
    """A host cannot be used. `host: what: remedy` in one line."""


class Remote:
    """The agent of a host. `ssh`: the command that reaches it, () for this machine itself. Close it."""

    def __init__(self, host: str, ssh: Sequence[str], python: str = sys.executable):
        self.host, self.python = host, python
        self._answers: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        command = [python, "-c", BEGIN]
        if ssh:
            # In sh, whatever the shell of the user is.
            ways = " || ".join(f"{{ command -v {each} >/dev/null && exec {each} -c {shlex.quote(BEGIN)}; }}"
                               for each in dict.fromkeys((shlex.quote(python), "python3")))  # fmt: skip
            command = [*ssh, *QUIETLY, host, f"/bin/sh -c {shlex.quote(f'{ways} || echo fompi-no-python >&2')}"]
        own = {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"}  # of who sits here
        self.process = subprocess.Popen(
            command,
            env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C ends this process, which closes their input
        )  # fmt: skip
        self._said: list[str] = []
        self._has_ended = False
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._listening = threading.Thread(target=self._listen, daemon=True)
        for thread in (self._hearing, self._listening):
            thread.start()
        self._write(repr(Path(__file__).with_name("agent.py").read_text()))

    def ask(self, what: str, **arguments: Any) -> Future[Any]:
        """The answer of the agent, later."""
        answer: Future[Any] = Future()
        with self._lock:
            number = len(self._answers)
            self._answers[number] = answer
            if self._has_ended:
                answer.set_exception(self._why())
        self._write(json.dumps({"number": number, "what": what, "arguments": arguments}))
        return answer

    def answer(self, what: str, **arguments: Any) -> Any:
        """The answer of the agent. Raises HostError if none comes in time, or if the host cannot be reached."""
        try:
            return self.ask(what, **arguments).result(timeout=ANSWER_SECONDS)
        except NotInTime:
            raise HostError(
                f"{self.host}: no answer within {ANSWER_SECONDS:g} s: is it overloaded? try `ssh {self.host} uptime`"
            ) from None

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended: the listener says so
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError, KeyError, TypeError):  # what a host prints at a login is no answer
                reply = json.loads(line)
                answer = self._answers[reply["number"]]
                if "error" in reply:
                    answer.set_exception(HostError(f"{self.host}: {reply['error']}"))
                else:
                    answer.set_result(reply["value"])
        self._hearing.join(END_SECONDS)
        with self._lock:
            self._has_ended = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._why())

    def _hear(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.append(line.rstrip())

    def _why(self) -> HostError:
        return HostError(why_unreached(self.host, "\n".join(self._said), self.python))

    def close(self) -> None:
        """End the agent."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for thread, stream in ((self._listening, self.process.stdout), (self._hearing, self.process.stderr)):
            thread.join(END_SECONDS)
            if stream is not None and not thread.is_alive():  # a connection that ssh shares may hold it open
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


WAYS = (
    (r"could not resolve hostname", "no such name", "write its address into /etc/hosts or ~/.ssh/config"),
    (r"timed out|timeout", f"no answer within {CONNECT_SECONDS} s", "is it on, and in this network? type `ping {0}`"),
    (r"connection refused", "it has no ssh server", "on {0} type `sudo apt install openssh-server`"),
    (r"no route to host|network is unreachable", "no way to it", "is it in this network? type `ip route get {0}`"),
    (r"host key verification failed", "its key is unknown here, or has changed", "type `ssh {0} true` and compare it"),
    (r"permission denied", "it takes no key of yours",
     "type `ssh-copy-id {0}`, or `ssh-add` if your key has a passphrase"),
    (r"too many authentication failures", "it takes no key of yours", "write IdentityFile for {0} into ~/.ssh/config"),
    (r"fompi-no-python", "it has no python3", "on {0} type `sudo apt install python3-venv`"),
)  # fmt: skip
"""What ssh says, what it means, and what to do."""


def why_unreached(host: str, said: str, python: str = "python3") -> str:
    """One line on a host that does not answer, from what ssh has printed."""
    for pattern, meaning, remedy in WAYS:
        if re.search(pattern, said, re.IGNORECASE):
            return f"{host}: {meaning}: {remedy.format(host)}"
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    return f"{host}: ssh ended{f' ({last.strip()})' if last else ''}: try `ssh {host} {python} --version`"


def is_here(host: str) -> bool:
    """True if the name is that of this machine."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:  # a name of ~/.ssh/config
        return False
    for address in found:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as trial, suppress(OSError):
            trial.bind((address, 0))  # only an address of this machine can be bound
            return True
    return False
