"""The update as one compiled pass on the CPU, where a C compiler is at hand.

Threads are torch's number of them; ctypes lets go of the interpreter while they run.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from torch import Tensor

from pathsgd.optim.fused import build
from pathsgd.optim.fused.blocked import Plain
from pathsgd.optim.fused.build import ADAGRAD, ADAM, DECAY, MOMENTUM, MOVE, SUMS, Case
from pathsgd.optim.fused.implementation import LayerTensors
from pathsgd.optim.rule import Rule

SMALL = 1 << 15
"""Entries of a layer under which threads cost more than they give."""


class Numbers(ctypes.Structure):
    """``struct numbers`` of update.c."""

    _fields_ = tuple(
        (name, ctypes.c_float) for name in (
            "rate", "sign", "shrink", "coupled", "momentum",
            "first", "rest_first", "second", "rest_second", "correction", "eps",
        )
    )  # fmt: skip


class LayerPointers(ctypes.Structure):
    """``struct layer`` of update.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "w", "g", "m", "v", "inverse_out", "inverse_into", "next_into", "next_out", "row_sums",
            "column_sums",
        )),
        *((name, ctypes.c_int64) for name in ("columns", "w_stride", "g_stride")),
    )  # fmt: skip


class Compiled(Plain):
    """fp32 layers by update.c; everything small by torch."""

    def _move_bias(self, k: int, layer: LayerTensors) -> None:
        bias, grad, state = layer.bias, layer.bias_grad, layer.bias_state
        if bias is None or grad is None:
            return
        function = build.function(case_of(layer.bias_rule))
        if function is None or not _in_one_piece(bias, grad, *state):
            super()._move_bias(k, layer)
            return
        # A matrix of one column, whose sums nobody asks for.
        zeros = _nothing(layer.rows)
        tensors = (bias, grad, *(*state, bias, bias)[:2], self.bias[k], _ONE, zeros, zeros,
                   _empty(layer.rows), _empty(1))  # fmt: skip
        own = LayerPointers(*(t.data_ptr() for t in tensors), 1, 1, 1)
        numbers = numbers_of(layer.bias_rule)
        function(ctypes.byref(own), ctypes.byref(numbers), 0, layer.rows)

    def _pass(self, k: int, layer: LayerTensors, into: bool, out: bool, move: bool) -> None:
        shares = _shares(layer)
        # Sums that nobody asked for are of zeros: cheaper than a case of its own.
        next_into = self.next_into[k] if into else _nothing(layer.columns)
        next_out = self.next_out[k] if out else _nothing(layer.rows)
        row_sums, column_sums = _empty(layer.rows), _empty(len(shares), layer.columns).zero_()
        weight, grad = layer.weight, layer.weight_grad
        state = (*layer.weight_state, weight, weight)[:2]  # a place for pointers that are not looked at
        tensors = (
            weight, grad, *state, self.out[k], self.into[k], next_into, next_out, row_sums,
        )  # fmt: skip
        numbers = numbers_of(layer.rule)
        function = build.function(case_of(layer.rule, move))
        assert function is not None

        def work(n: int) -> None:
            own = LayerPointers(
                *(t.data_ptr() for t in tensors), column_sums[n].data_ptr(), layer.columns, weight.stride(0),
                grad.stride(0),
            )  # fmt: skip
            function(ctypes.byref(own), ctypes.byref(numbers), *shares[n])

        _each(work, len(shares))
        self._keep(k, layer, [row_sums] if into else [], _summed(column_sums) if out else None)


def _summed(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _in_one_piece(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def _empty(*shape: int) -> Tensor:
    """Floats for update.c, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


_ONE = _empty(1).fill_(1.0)


@functools.lru_cache(maxsize=64)
def _nothing(length: int) -> Tensor:
    """Zeros that are only read."""
    return _empty(length).zero_()


def case_of(rule: Rule, move: bool = True) -> Case:
    p = int(rule.p)
    if not move:
        return Case(SUMS, p)
    sgd = MOMENTUM if rule.states else DECAY if rule.weight_decay else MOVE
    kind = {"sgd": sgd, "adagrad": ADAGRAD, "adam": ADAM}[rule.method]
    live = rule.decay == "live" and rule.weight_decay != 0
    return Case(kind, p, coupled=bool(rule.coupled), live=live, nesterov=rule.nesterov)


def numbers_of(rule: Rule) -> Numbers:
    first, second = rule.betas
    return Numbers(
        float(rule.rate()), rule.sign, float(rule.shrink()), rule.coupled, rule.momentum,
        first, 1 - first, second, 1 - second, float(rule.correction()), rule.eps,
    )  # fmt: skip


def fits(layers: Sequence[LayerTensors]) -> bool:
    """Whether update.c can walk these layers: fp32 on the CPU, rows that lie in one piece."""
    tensors = [t for layer in layers for t in (layer.weight, layer.weight_grad)]
    state = [s for layer in layers for s in layer.weight_state]
    return (
        all(t.dtype == torch.float32 and t.device.type == "cpu" for t in (*tensors, *state))
        and all(t.stride(1) == 1 for t in tensors)
        and all(s.is_contiguous() for s in state)
        and all(build.function(case_of(layer.rule, move)) for layer in layers for move in (True, False))
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
