"""Builds the calls in C (docs/inside/native.md). Without a compiler fompi has none. The rest is in pyproject.toml."""

from glob import glob
from tempfile import mkdtemp

from setuptools import Extension, setup

SOURCES = ("engine", "chain", "half", "kernels", "processor", "ucx", "v3", "wire", "xla")

NATIVE = Extension(
    "fompi.native._native",
    [f"fompi/native/{name}.c" for name in SOURCES],
    depends=sorted(glob("fompi/native/*.h")),
    extra_compile_args=["-O3", "-ffp-contract=off"],
    py_limited_api=True,
    optional=True,
)

OPTIONS = {"build_ext": {"build_temp": mkdtemp()}, "bdist_wheel": {"py_limited_api": "cp311"}}
"""Two environments may build at the same time."""

setup(ext_modules=[NATIVE], options=OPTIONS)
