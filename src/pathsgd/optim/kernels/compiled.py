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
from torch import Tensor

from pathsgd.optim.kernels.layer import LayerTensors, Rule, moved
from pathsgd.optim.kernels.plain import Plain

SOURCE = Path(__file__).with_name("update.c")
SMALL = 1 << 15
"""Entries of a layer under which threads cost more than they give."""


class Numbers(ctypes.Structure):
    """``struct numbers`` of update.c."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("lr", "decay", "momentum", "sign")),
        *((name, ctypes.c_int32) for name in ("nesterov", "p", "move")),
    )


class Compiled(Plain):
    """fp32 layers by update.c; everything small by torch."""

    def __init__(self, p: int, dtype: torch.dtype) -> None:
        super().__init__(p, dtype)
        if library() is None:
            raise RuntimeError("no C compiler was found, or it could not compile update.c: use 'blocked'")

    def update(self, k: int, layer: LayerTensors, rule: Rule, *, into: bool, out: bool) -> None:
        if layer.bias is not None:
            assert layer.bias_grad is not None
            bias, momentum = moved(layer.bias, layer.bias_grad, layer.bias_momentum, self.out[k], rule)
            layer.bias.copy_(bias)
            if layer.bias_momentum is not None and momentum is not None:
                layer.bias_momentum.copy_(momentum)
        self._pass(k, layer, rule, into, out, move=True)

    def sums(self, k: int, layer: LayerTensors, rule: Rule, *, into: bool, out: bool) -> None:
        self._pass(k, layer, rule, into, out, move=False)

    def _pass(self, k: int, layer: LayerTensors, rule: Rule, into: bool, out: bool, move: bool) -> None:
        lr = float(rule.lr)
        numbers = Numbers(
            lr, 1 - lr * rule.weight_decay, rule.momentum, -1.0 if rule.maximize else 1.0,
            rule.nesterov, self.p, move,
        )  # fmt: skip
        shares = _shares(layer)
        row_sums = torch.empty(layer.rows) if into else None
        column_sums = torch.zeros(len(shares), layer.columns) if out else None
        grad = layer.weight_grad
        fixed = (
            _pointer(layer.weight), _pointer(grad), _pointer(layer.weight_momentum),
            _pointer(self.out[k]), _pointer(self.into[k]),
            _pointer(self.next_into[k] if into else None), _pointer(self.next_out[k] if out else None),
            _pointer(row_sums),
        )  # fmt: skip
        strides = (layer.weight.stride(0), grad.stride(0))
        function = library()
        assert function is not None

        def work(n: int) -> None:
            own = None if column_sums is None else column_sums[n]
            function(
                *fixed, _pointer(own), *shares[n], layer.columns, *strides, ctypes.byref(numbers)
            )  # fmt: skip

        _each(work, len(shares))
        self._keep(
            k, layer, [] if row_sums is None else [row_sums],
            None if column_sums is None else column_sums.sum(0),
        )  # fmt: skip


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
        function.argtypes = [*[pointer] * 9, *[integer] * 5, pointer]
        function.restype = None
        return function
    return None


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    """Compiled beside its place and moved there, so that no other process loads half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "update.so"
        command = [compiler, *flags, "-std=c11", "-shared", "-fPIC", "-o", str(made), str(SOURCE)]
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


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
