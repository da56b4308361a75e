"""The environment variables of fompi, in one table: their defaults, and which values they take.

    text = environment.value("FOMPI_TIMEOUT")     # what is set, or the default

A value that a variable does not take is read as the default. `refusal` says so, and the ranks agree on it when a
communicator is created. So all ranks get the error, even if only one of them has the value. The page
docs/reference/environment.md lists the same variables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fompi.base.errors import LaunchError, meant, warn

PREFIX = "FOMPI_"


@dataclass(frozen=True)
class Variable:
    """One variable. `takes` are its values in words, `is_taken` tests a value. An empty value counts as not set."""

    name: str
    default: str
    takes: str
    is_taken: Callable[[str], bool]

    def refusal(self, text: str) -> LaunchError | None:
        """The error if the variable does not take this value, else None."""
        if not text or self.is_taken(text):
            return None
        near = meant(text, self.takes.removeprefix("one of ").split(", "))
        shown = "..." if self.name.endswith("_TOKEN") else text
        return LaunchError(f"{self.name}={shown}: give {self.takes}{near}")


def _one_of(name: str, default: str, *choices: str) -> Variable:
    return Variable(name, default, f"one of {', '.join(choices)}", choices.__contains__)


def _is_positive(text: str) -> bool:
    with suppress(ValueError):
        return float(text) > 0
    return False


def _is_writable(text: str) -> bool:
    return os.access(Path(text).absolute().parent, os.W_OK)


def _is_report(text: str) -> bool:
    return text in ("0", "1", "short", "full") or (text.endswith(".json") and _is_writable(text))


def _is_secret(text: str) -> bool:
    """True for at least 128 bits, in base64 or hexadecimal digits."""
    return len(text) >= 22 and len(set(text)) >= 8


def _is_folder(text: str) -> bool:
    return text == "0" or not os.path.exists(text) or os.path.isdir(text)  # unlike Path's, they never raise


VARIABLES = {
    variable.name: variable
    for variable in (
        Variable("FOMPI_TIMEOUT", "300", "a number of seconds above 0", _is_positive),
        _one_of("FOMPI_PROGRESS", "auto", "auto", "helper", "library", "poll"),
        _one_of("FOMPI_CARRIER", "auto", "auto", "mpi", "ucx"),
        Variable("FOMPI_CONNECTIONS", "1", "a number from 1 to 16", lambda text: text in map(str, range(1, 17))),
        _one_of("FOMPI_ENGINE", "auto", "auto", "native", "python"),
        Variable("FOMPI_REPORT", "0", "0, 1, short, full, or a .json file in a folder that can be written", _is_report),
        Variable("FOMPI_DIGEST", "", "a folder", lambda text: not os.path.exists(text) or os.path.isdir(text)),
        Variable("FOMPI_RECORD", "", "a folder", lambda text: not os.path.exists(text) or os.path.isdir(text)),
        # Whether there is such a machine is known when it is loaded.
        Variable("FOMPI_MACHINE", "", "the name of a preset, or a file", bool),
        Variable("FOMPI_CACHE", "~/.cache/fompi", "a folder, or 0", _is_folder),
        _one_of("FOMPI_GPU_AWARE", "auto", "auto", "0", "1"),
        _one_of("FOMPI_PATH", "auto", "auto", "staged", "direct", "ipc"),
        _one_of("FOMPI_DEVICE", "auto", "auto", "software", "cuda"),
        _one_of("FOMPI_COUNTERS", "auto", "auto", "0", "1"),
        _one_of("FOMPI_SINGLETONS", "0", "0", "1"),
        _one_of("FOMPI_TORCH", "0", "0", "1"),
        Variable("FOMPI_MEMBERS_TOKEN", "", "a random text of 22 characters or more", _is_secret),
        _one_of("FOMPI_DEBUG", "0", "0", "1"),
        Variable("FOMPI_AGAIN", "", "a file in a folder that can be written", _is_writable),
    )
}
"""All variables, by name."""


def value(name: str, environ: Mapping[str, str] | None = None) -> str:
    """What the variable says. Its default if it is not set, or if it does not take the value (`refusal`)."""
    variable, text = VARIABLES[name], (os.environ if environ is None else environ).get(name, "")
    return text if text and variable.refusal(text) is None else variable.default


def check(name: str, text: str | None = None) -> None:
    """Raise LaunchError if the variable does not take the value `text` (None: the value that is set)."""
    error = VARIABLES[name].refusal(os.environ.get(name, "") if text is None else text)
    if error is not None:
        raise error


def is_set(name: str) -> bool:
    """True if the variable is set, so that its value is not the default."""
    return bool(os.environ.get(VARIABLES[name].name))


def preset(name: str, text: str) -> None:
    """Set the variable for this process, unless it is set already. For commands, before MPI starts."""
    if not is_set(name):
        os.environ[VARIABLES[name].name] = text


def cache_folder() -> Path | None:
    """The folder of measured choices (FOMPI_CACHE). None: they are not kept on disk."""
    chosen, default = value("FOMPI_CACHE"), VARIABLES["FOMPI_CACHE"].default
    if chosen != default:
        return None if chosen == "0" else Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # the user has no home folder
        return Path(base, "fompi") if base else Path(default).expanduser()
    return None


def refusal(environ: Mapping[str, str] | None = None) -> LaunchError | None:
    """One error for all variables that have a value that they do not take, else None."""
    environ = os.environ if environ is None else environ
    errors = [variable.refusal(environ.get(name, "")) for name, variable in VARIABLES.items()]
    found = [str(error) for error in errors if error is not None]
    return LaunchError("; ".join(found)) if found else None


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each variable that looks like one of fompi and is none, with the name that was meant."""
    environ = os.environ if environ is None else environ
    return [
        f"{name} is no variable of fompi: {_advice(name)}"
        for name in environ
        if name.upper().startswith(PREFIX) and name not in VARIABLES
    ]


def sentences() -> list[str]:
    """All that is wrong with the variables: bad values, then names that are unknown."""
    error = refusal()
    return [*([] if error is None else [str(error)]), *unknown()]


def warn_of_unknown() -> None:
    """Issue a UserWarning for each sentence of `unknown`."""
    for sentence in unknown():
        warn(sentence)


def _advice(name: str) -> str:
    endings = [known.removeprefix(PREFIX) for known in VARIABLES]
    near = meant(name.upper().removeprefix(PREFIX), endings, PREFIX + "{} is one")
    return near or f"there are {', '.join(VARIABLES)}"
