"""The C of fompi under the warnings of the compiler, and its tests under the sanitizers of GCC.

The instrumented library is built beside the installed one, and takes its place in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "fompi/native").glob("*.c"))
pytestmark = pytest.mark.timeout(320)
STRICT = "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"

RUN = """
import importlib.util, sys
import fompi.native, pytest
spec = importlib.util.spec_from_file_location("fompi.native._native", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules[spec.name] = fompi.native._native = module
sys.exit(pytest.main(sys.argv[2:]))
"""


def compile_c(*arguments):
    """Run GCC. Without GCC the test fails."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.fail("there is no gcc, which this test needs: apt-get install gcc libc6-dev")
    include = f"-I{sysconfig.get_paths()['include']}"
    done = subprocess.run([compiler, include, *map(str, arguments)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_on(flags, runtimes, made, tests, options):
    """Run these tests with a library that was compiled with these flags. Returns what they and the sanitizer print."""
    preloaded = [compile_c(f"-print-file-name={name}") for name in runtimes]
    if not all(map(os.path.isabs, preloaded)):
        pytest.fail(f"this gcc has no {' or '.join(runtimes)}: apt-get install libgcc-12-dev, or that of its version")
    compile_c("-g", "-shared", "-fPIC", *STRICT, *flags, *SOURCES, "-o", made)
    # Python's own allocator would hide what is freed too early.
    env = {**os.environ, **options, "LD_PRELOAD": " ".join(preloaded), "PYTHONMALLOC": "malloc"}
    command = [
        sys.executable,
        "-c",
        RUN,
        made,
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--capture=sys",
        *tests,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert " passed" in done.stdout
    return done.stdout + done.stderr


def test_the_compiler_has_nothing_to_say(tmp_path):
    compile_c(
        "-O2", "-shared", "-fPIC", *STRICT, *SOURCES, ROOT / "tests/local/stand_in.c", "-o", tmp_path / "native.so"
    )


def test_addresses_and_undefined_behaviour(tmp_path):
    """The tests of calls in C, with some of those that run every plan."""
    flags = "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"
    tests = [
        "tests/local/test_engine_in_c.py",
        "tests/pure/test_native.py",
        "-k",
        "not bits_of_the_twin or 3-float16 or 3-int64",
    ]
    said = run_on(flags, ["libasan.so", "libubsan.so"], tmp_path / "a.so", tests, {"ASAN_OPTIONS": "detect_leaks=0"})
    assert "runtime error" not in said


def test_threads(tmp_path):
    """What one thread writes and another one reads is guarded by the lock, or atomic."""
    tests = ["tests/local/test_engine_in_c.py", "tests/pure/test_native.py", "-k", "test_engine_in_c or thread"]
    said = run_on(
        ["-O1", "-fsanitize=thread"], ["libtsan.so"], tmp_path / "t.so", tests, {"TSAN_OPTIONS": "exitcode=66"}
    )
    assert "WARNING" not in said
