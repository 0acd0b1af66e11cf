"""The update in Triton: one launch for each layer, and one more that finishes the sums of all layers.

Sums are kept in parts, each written by one program. A kernel that needs a sum adds its few parts up while
loading it; ``finish`` does so for all of them and takes the inverse roots that the next step needs.
Everything stays on the device, at fixed addresses, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import triton
from torch import Tensor

from pathsgd.geometry.cuda_graph import free_after_capture
from pathsgd.geometry.devices import on_device
from pathsgd.geometry.range_check import safe_range
from pathsgd.graph.chains import Chain
from pathsgd.optim.fused.exponent_frame import ExponentFrame
from pathsgd.optim.fused.gpu.recorded_steps import RecordedSteps
from pathsgd.optim.fused.gpu.triton_kernels import OUT_AT_ONCE, finish_kernel, layer_kernel
from pathsgd.optim.fused.gpu.triton_layout import COLUMNS, layout_of
from pathsgd.optim.fused.gpu.triton_rule import OPTIONS, QUICK_FROM, find_method, find_numbers
from pathsgd.optim.fused.implementation import Launch, LayerTensors

ROWS = {0: 8, 1: 4, 2: 4}
"""Rows of a block, by the numbers of state for a weight: the fastest on an H200. Sums without an update take
as many, so that they are added up in the same order."""
LARGE = 160 * 1024
"""Bytes of shared memory that hold three pipeline stages of two programs, as on an A100; else two."""
FINISH_BLOCK = 128
"""Entries of a vector that one program of finish_kernel handles."""


class TritonChain:
    """A chain's gammas on a GPU."""

    dtype = torch.float32

    def __init__(self, chain: Chain, p: int, device: torch.device) -> None:
        self.p, self.device = p, device
        self.layout = layout = layout_of(chain, _processors(device))
        self.stages = _stages(device)
        vectors = layout.vectors
        self.parts = torch.zeros(sum(v.parts * v.length for v in vectors), dtype=self.dtype, device=device)
        self.inverse = torch.zeros(sum(v.length for v in vectors), dtype=self.dtype, device=device)
        # Views are made once: making one takes as long as launching a kernel.
        self._into, self._out = (
            [self.parts[v.offset :] for v in group] for group in (layout.into, layout.out)
        )
        self._inverse_into, self._inverse_out = (
            [self.inverse[v.place :] for v in group] for group in (layout.into, layout.out)
        )
        self.flag = torch.zeros((), dtype=torch.int32, device=device)
        self._seen = torch.zeros((), dtype=torch.int32, pin_memory=device.type == "cuda")
        free_after_capture(self, self._seen)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        blocks = [
            (v.offset, v.parts, v.length, v.place, start)
            for v in vectors
            for start in range(0, v.length, FINISH_BLOCK)
        ]
        self.table = torch.tensor(blocks, dtype=torch.int64, device=device)
        self._recorded = RecordedSteps(device) if device.type == "cuda" else None
        self.frame = ExponentFrame((0,) * len(chain), (0,) * len(chain), p)

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor], frame: ExponentFrame) -> None:
        if frame != self.frame and self._recorded is not None:
            self._recorded.clear()
        self.frame = frame
        self.parts.zero_()
        self.inverse.zero_()
        self.flag.zero_()
        self._seen.zero_()
        for vector, value in zip(self.layout.vectors, (*into, *out), strict=True):
            self.parts[vector.offset : vector.offset + vector.length].copy_(value)
        self.finish()

    def run(self, layers: Sequence[LayerTensors], launch: Launch) -> None:
        if self._recorded is None:
            launch(layers)
        else:
            with self.on_device():
                self._recorded.run(layers, launch)

    def update(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._launch(k, layer, into, out, move=True)

    def sum_powers(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._launch(k, layer, into, out, move=False)

    def _launch(self, k: int, layer: LayerTensors, into: bool, out: bool, move: bool) -> None:
        rule, bias_rule, layout, frame = layer.rule, layer.bias_rule, self.layout, self.frame
        unused = self.parts  # for pointers that the kernel does not read
        lr, lr_on_device = self._numbers(rule.lr, bias_rule.lr)
        step, step_on_device = self._numbers(rule.step, bias_rule.step)
        gradient = layer.weight_grad if move else layer.weight
        decay = rule.decay if rule.weight_decay or bias_rule.weight_decay else "none"
        layer_kernel[(layout.strips[k], triton.cdiv(layer.rows, layout.rows_each[k]))](
            layer.weight, gradient, *(*layer.weight_state, unused, unused)[:2],
            unused if layer.bias is None else layer.bias,
            unused if layer.bias_grad is None else layer.bias_grad,
            *(*layer.bias_state, unused, unused)[:2],
            self._inverse_out[k], self._inverse_into[k],
            self._into[k], layout.into[k].parts, self._out[k], layout.out[k].parts,
            self._into[k + 1] if into else unused, self._out[k - 1] if out else unused,
            layer.rows, layer.columns, layout.rows_each[k], *layer.weight.stride(), *gradient.stride(),
            *lr, *step, rule.weight_decay, bias_rule.weight_decay, *find_numbers(rule),
            frame.root_factor(k), frame.bias_root_factor(k), frame.into_factor(k) if into else 1.0,
            frame.bias_factor(k) if into else 1.0, frame.out_factor(k) if out else 1.0,
            LR_ON_DEVICE=lr_on_device, STEP_ON_DEVICE=step_on_device, MOVE=move, METHOD=find_method(rule),
            NESTEROV=rule.nesterov, DECAY=decay, MAXIMIZE=rule.maximize, QUICK=rule.eps >= QUICK_FROM,
            BIAS=layer.bias is not None, INTO=into, OUT=out,
            OUT_ROUNDS=triton.cdiv(layout.out[k].parts, OUT_AT_ONCE.value) if out else 1, P=self.p,
            ROWS=ROWS[rule.state_count], COLUMNS=COLUMNS, STAGES=self.stages, **OPTIONS,
        )  # fmt: skip

    def _numbers(self, *values: float | Tensor) -> tuple[list[float | Tensor], bool]:
        """(value, pointer) of each for the kernel, and whether it should read the pointer."""
        on_device = all(isinstance(value, Tensor) and value.device == self.device for value in values)
        found: list[float | Tensor] = []
        for value in values:
            found += [0.0, value] if on_device else [float(value), self.parts]
        return found, on_device

    def on_device(self) -> AbstractContextManager[None]:
        return on_device(self.device)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
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
        numbers = {"P": self.p, "BLOCK": FINISH_BLOCK, **OPTIONS}
        finish_kernel[(len(self.table),)](
            self.parts, self.inverse, self.table, self.flag, low, high, **numbers
        )

    def in_range(self, wait: bool = True) -> bool:
        if wait:
            return int(self.flag) == 0
        self._seen.copy_(self.flag, non_blocking=True)  # so this may be a step old
        return int(self._seen) == 0


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _stages(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return 3 if torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= LARGE else 2
