"""The version of fompi. It is a plain literal, so that the build can read it without importing the package."""

__version__ = "0.1.0"
