"""Packages that fompi uses if they are there, and the line of pip for those that are not."""

from __future__ import annotations

from importlib import import_module

from fompi.base.errors import PackageError


def need(package: str) -> None:
    """Raise PackageError, with the line of pip, if `package` is not installed, on which the room of its name stands.

    An installed package that cannot be imported raises its own error.
    """
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name not in (package, None):  # it is there, but lacks a package of its own
            raise
        raise PackageError(f"fompi.{package} needs {package}, which is not installed: pip install {package}") from None
