"""The update as one compiled pass on the CPU, where a C compiler is at hand.

``update.c`` takes under a second to compile, once per machine: it is kept in the user's cache. Threads are
torch's number of them; ctypes lets go of the interpreter while they run.
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
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch

from pathsgd.optim.kernels.layer import LayerTensors
from pathsgd.optim.kernels.plain import Plain

SOURCE = Path(__file__).with_name("update.c")
SMALL = 1 << 15
"""Entries of a layer under which threads cost more than they give."""


class Numbers(ctypes.Structure):
    """``struct numbers`` of update.c."""

    _fields_ = tuple(
        (name, ctypes.c_float) for name in ("lr", "decay", "sign", "momentum", "take_h", "take_b")
    )


class LayerPointers(ctypes.Structure):
    """``struct layer`` of update.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "w", "g", "m", "inverse_out", "inverse_into", "next_into", "next_out", "row_sums", "column_sums",
        )),
        *((name, ctypes.c_int64) for name in ("columns", "w_stride", "g_stride")),
    )  # fmt: skip


SUMS, MOVE, DECAY, MOMENTUM = range(4)
"""``enum`` of update.c."""


class Compiled(Plain):
    """fp32 layers by update.c; everything small by torch."""

    def _pass(self, k: int, layer: LayerTensors, into: bool, out: bool, move: bool) -> None:
        rule = layer.rule
        lr = float(rule.lr)
        nesterov = (1.0, rule.momentum) if rule.nesterov else (0.0, 1.0)
        numbers = Numbers(
            lr, 1 - lr * rule.weight_decay, -1.0 if rule.maximize else 1.0, rule.momentum, *nesterov
        )
        momentum = layer.weight_momentum
        kind = (
            SUMS if not move else MOMENTUM if momentum is not None else DECAY if rule.weight_decay else MOVE
        )
        shares = _shares(layer)
        # Sums that nobody asked for are of zeros: cheaper than a case of its own.
        next_into = self.next_into[k] if into else torch.zeros(layer.columns)
        next_out = self.next_out[k] if out else torch.zeros(layer.rows)
        row_sums, column_sums = torch.empty(layer.rows), torch.zeros(len(shares), layer.columns)
        weight, grad = layer.weight, layer.weight_grad
        tensors = (
            weight, grad, weight if momentum is None else momentum, self.out[k], self.into[k], next_into,
            next_out, row_sums,
        )  # fmt: skip
        function = library()
        assert function is not None

        def work(n: int) -> None:
            own = LayerPointers(
                *(t.data_ptr() for t in tensors), column_sums[n].data_ptr(), layer.columns, weight.stride(0),
                grad.stride(0),
            )  # fmt: skip
            function(ctypes.byref(own), ctypes.byref(numbers), *shares[n], kind, self.p)

        _each(work, len(shares))
        self._keep(k, layer, [row_sums] if into else [], column_sums.sum(0) if out else None)


def fits(layers: Sequence[LayerTensors]) -> bool:
    """Whether update.c can walk these layers: fp32 on the CPU, rows that lie in one piece."""
    tensors = [t for layer in layers for t in (layer.weight, layer.weight_grad)]
    momenta = [layer.weight_momentum for layer in layers if layer.weight_momentum is not None]
    return (
        all(t.dtype == torch.float32 and t.device.type == "cpu" and t.stride(1) == 1 for t in tensors)
        and all(m.is_contiguous() for m in momenta)
        and library() is not None
    )


@functools.cache
def library() -> Callable[..., None] | None:
    """The compiled function, or None where it cannot be had."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None or os.name != "posix":
        return None
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pathsgd"
    for flags in (("-O3", native), ("-O3",)):
        key = hashlib.sha256(repr((SOURCE.read_text(), compiler, flags, _processor())).encode()).hexdigest()
        target = folder / f"update-{key[:16]}.so"
        try:
            if not target.exists():
                _compile(compiler, flags, target)
            function = ctypes.CDLL(str(target)).pathsgd_rows
        except (OSError, subprocess.SubprocessError):
            continue
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = [pointer, pointer, integer, integer, ctypes.c_int32, ctypes.c_int32]
        function.restype = None
        return function
    return None


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    """Compiled beside its place and moved there, so that no other process loads half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "update.so"
        command = [
            compiler,
            *flags,
            "-std=gnu11",
            "-fopenmp-simd",
            "-shared",
            "-fPIC",
            "-o",
            str(made),
            str(SOURCE),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        made.replace(target)


def _processor() -> str:
    """What this machine's instructions are: a cache may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted(
            {
                line
                for line in lines
                if line.lower().startswith(("model name", "flags", "features", "cpu part"))
            }
        )
    )


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="pathsgd")


def _each(work: Callable[[int], None], count: int) -> None:
    """Runs ``work(0 .. count - 1)`` at the same time, the last one here."""
    waiting = [_pool(count - 1).submit(work, n) for n in range(count - 1)] if count > 1 else []
    work(count - 1)
    for future in waiting:
        future.result()


def _shares(layer: LayerTensors) -> list[tuple[int, int]]:
    """The rows of each thread."""
    threads = 1 if layer.weight.numel() < SMALL else min(torch.get_num_threads(), max(layer.rows, 1))
    edges = [layer.rows * n // threads for n in range(threads + 1)]
    return list(pairwise(edges))
