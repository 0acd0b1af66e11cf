"""update.c as a function: compiled for one case the first time it is asked for, and kept in the user's cache.

A case takes about half a second, once per machine.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("update.c")
OPTIONS = ("-O3", "-std=gnu11", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


class Case(NamedTuple):
    """What the loops of update.c are compiled for."""

    kind: int
    p: int
    coupled: bool = False
    live: bool = False
    nesterov: bool = False


SUMS, MOVE, DECAY, MOMENTUM, ADAGRAD, ADAM = range(6)
"""The kinds of update.c."""


@functools.cache
def function(case: Case) -> Callable[..., None] | None:
    """``pathsgd_rows`` for this case, or None where there is no compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None or os.name != "posix":
        return None
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pathsgd"
    except RuntimeError:  # a user without a home
        return None
    defines = tuple(f"-D{name.upper()}={int(value)}" for name, value in case._asdict().items())
    for options in ((*OPTIONS, native, *defines), (*OPTIONS, *defines)):
        key = hashlib.sha256(repr((SOURCE.read_text(), compiler, options, _processor())).encode()).hexdigest()
        target = folder / f"update-{key[:16]}.so"
        try:
            if not target.exists():
                _compile(compiler, options, target)
            found = ctypes.CDLL(str(target)).pathsgd_rows
        except (OSError, subprocess.SubprocessError):
            continue
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        found.argtypes = [pointer, pointer, integer, integer]
        found.restype = None
        return found
    return None


def available() -> bool:
    """Whether a compiler is at hand and works."""
    return function(Case(MOVE, p=2)) is not None


def _compile(compiler: str, options: Sequence[str], target: Path) -> None:
    """Compiled beside its place and moved there, so that no other process loads half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "update.so"
        command = [compiler, *options, "-o", str(made), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        made.replace(target)


@functools.cache
def _processor() -> str:
    """What this machine's instructions are: a cache may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    telling = ("model name", "flags", "features", "cpu part")
    return "\n".join(sorted({line for line in lines if line.lower().startswith(telling)}))
