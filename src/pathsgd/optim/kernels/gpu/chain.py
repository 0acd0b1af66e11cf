"""The update in Triton: each layer one launch, the sums of all layers finished in one more.

Sums are kept in parts, each written by one program. Whoever needs a sum adds its few parts up while
loading it; ``finish`` does so for all of them and takes the inverse roots that the next step needs.
Everything stays on the device, at fixed addresses, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
from torch import Tensor

from pathsgd.geometry.range import safe_range
from pathsgd.graph.chains import Chain
from pathsgd.optim.kernels.gpu.code import finish_kernel, layer_kernel
from pathsgd.optim.kernels.layer import LayerTensors
from pathsgd.optim.kernels.rule import Rule

ROWS, COLUMNS, WARPS, STAGES = 16, 512, 4, 1
"""The block of a layer that a program works on at a time."""
PROGRAMS = 4
"""Of a layer, for each processor: so many are at work at the same time."""
FINISHED = 128
"""Entries of a vector that a program finishes."""
LOOK_EVERY = 16
"""Steps between two looks at whether plain floats are still enough: far too few to leave their range."""


@dataclass(frozen=True)
class _Vector:
    """Where a vector's parts and its inverse root lie in the two flat tensors of a chain."""

    offset: int
    parts: int
    length: int
    place: int


class OnGpu:
    """A chain's gammas on a GPU."""

    def __init__(self, chain: Chain, p: int, device: torch.device) -> None:
        self.p, self.device = p, device
        programs = PROGRAMS * _processors(device)
        self.strips = [triton.cdiv(layer.inputs, COLUMNS) for layer in chain]
        self.rows_each = []
        for layer, strips in zip(chain, self.strips, strict=True):
            shares = max(programs // strips, 1)
            self.rows_each.append(triton.cdiv(triton.cdiv(layer.outputs, shares), ROWS) * ROWS)
        shares = [triton.cdiv(c.outputs, each) for c, each in zip(chain, self.rows_each, strict=True)]
        biases = [layer.bias is not None for layer in chain]
        # into[k] is summed by layer k - 1, out[k] by layer k + 1; the first and the last are ones.
        into_parts = [1, *(s + b for s, b in zip(self.strips[:-1], biases[:-1], strict=True))]
        out_parts = [*shares[1:], 1]
        sizes = [
            *zip(into_parts, (layer.inputs for layer in chain), strict=True),
            *zip(out_parts, (layer.outputs for layer in chain), strict=True),
        ]
        offsets = [0, *accumulate(parts * length for parts, length in sizes)]
        places = [0, *accumulate(length for _, length in sizes)]
        vectors = [
            _Vector(offset, parts, length, place)
            for (parts, length), offset, place in zip(sizes, offsets[:-1], places[:-1], strict=True)
        ]
        self.into, self.out = vectors[: len(chain)], vectors[len(chain) :]
        self.parts = torch.zeros(offsets[-1], device=device)
        self.inverse = torch.zeros(places[-1], device=device)
        self.flag = torch.zeros((), dtype=torch.int32, device=device)
        self._seen = torch.zeros((), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._steps = 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.table = torch.tensor(
            [
                (v.offset, v.parts, v.length, v.place, start)
                for v in vectors
                for start in range(0, v.length, FINISHED)
            ],
            dtype=torch.int64,
            device=device,
        )

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        self.parts.zero_()
        self.inverse.zero_()
        self.flag.zero_()
        self._seen.zero_()
        for vector, value in zip((*self.into, *self.out), (*into, *out), strict=True):
            self.parts[vector.offset : vector.offset + vector.length].copy_(value)
        self.finish()

    def update(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._launch(k, layer, into, out, move=True)

    def sums(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._launch(k, layer, into, out, move=False)

    def _launch(self, k: int, layer: LayerTensors, into: bool, out: bool, move: bool) -> None:
        rule, bias_rule = layer.rule, layer.bias_rule
        unused = self.parts  # a place for pointers that are not looked at
        first, second = rule.betas

        def place(tensor: Tensor | None) -> Tensor:
            return unused if tensor is None else tensor

        def parts(vectors: list[_Vector], j: int, wanted: bool = True) -> Tensor:
            return self.parts[vectors[j].offset :] if wanted else unused

        lr, lr_on_device = self._numbers(rule.lr, bias_rule.lr)
        step, step_on_device = self._numbers(rule.step, bias_rule.step)
        gradient = layer.weight_grad if move else layer.weight
        layer_kernel[(self.strips[k], triton.cdiv(layer.rows, self.rows_each[k]))](
            layer.weight, gradient, *(*layer.weight_state, unused, unused)[:2],
            place(layer.bias), place(layer.bias_grad), *(*layer.bias_state, unused, unused)[:2],
            self.inverse[self.out[k].place :], self.inverse[self.into[k].place :],
            parts(self.into, k), self.into[k].parts, parts(self.out, k), self.out[k].parts,
            parts(self.into, k + 1 if into else 0, into), parts(self.out, k - 1 if out else 0, out),
            layer.rows, layer.columns, self.rows_each[k], *layer.weight.stride(), *gradient.stride(),
            *lr, *step, rule.weight_decay, bias_rule.weight_decay, rule.sign, rule.momentum, rule.lr_decay,
            first, 1 - first, _log(first), second, 1 - second, _log(second), rule.eps,
            LR_ON_DEVICE=lr_on_device, STEP_ON_DEVICE=step_on_device, MOVE=move, METHOD=_method(rule),
            NESTEROV=rule.nesterov, DECAY=rule.decay, BIAS=layer.bias is not None, INTO=into, OUT=out,
            P=self.p, ROWS=ROWS, COLUMNS=COLUMNS, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip

    def _numbers(self, *values: float | Tensor) -> tuple[list[float | Tensor], bool]:
        """(value, place) of each for the kernel, and whether it should look there."""
        on_device = all(isinstance(value, Tensor) and value.device == self.device for value in values)
        found: list[float | Tensor] = []
        for value in values:
            found += [0.0, value] if on_device else [float(value), self.parts]
        return found, on_device

    @contextmanager
    def aside(self) -> Iterator[None]:
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def finish(self) -> None:
        _, low, high = safe_range(torch.float32)
        finish_kernel[(len(self.table),)](
            self.parts, self.inverse, self.table, self.flag, low, high, P=self.p, BLOCK=FINISHED
        )
        self._steps += 1

    def trusted(self) -> bool:
        if self._steps % LOOK_EVERY == 0:
            # Without waiting: what is read is what an earlier look brought here.
            self._seen.copy_(self.flag, non_blocking=True)
        return int(self._seen) == 0


def _method(rule: Rule) -> int:
    """SGD, MOMENTUM, ADAGRAD or ADAM of code.py."""
    return {"sgd": rule.states, "adagrad": 2, "adam": 3}[rule.method]


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
