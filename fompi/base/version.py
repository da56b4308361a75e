"""The version of fompi, as a plain literal: read by the build without importing the package."""

__version__ = "0.1.0"
