"""Packages that fompi uses if they are there, and the line of pip for those that are not."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from fompi.base.errors import PackageError

PIP = {
    "torch": "pip install torch",
    "jax": "pip install jax",
    "matplotlib": "pip install matplotlib",
}


def need(package: str, why: str = "") -> ModuleType:
    """The module `package`, which is optional. Raises PackageError, with the line of pip, if it is not installed.

    `why`: what needs it, if that is not the room of fompi with the same name. An installed package that cannot be
    imported raises its own error.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name not in (package, None):  # it is there, but lacks a package of its own
            raise
        raise PackageError(
            f"{why or f'fompi.{package}'} needs {package}, which is not installed: {PIP[package]}"
        ) from None
