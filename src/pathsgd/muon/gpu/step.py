"""BalancedMuon's step by kernels: ``RelativeStep.run`` in a dozen launches, however many blocks there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pathsgd._torch import is_capturing
from pathsgd.muon.block_table import BlockTable
from pathsgd.muon.blocks import Block
from pathsgd.muon.gpu.kernels import (
    CHUNK,
    FIELDS,
    SUMS,
    adam_kernel,
    measure_kernel,
    momentum_kernel,
    move_adam_kernel,
    move_kernel,
    normalize_kernel,
    sum_kernel,
)
from pathsgd.muon.orthogonalize import choose_dtype, iterate, make_diagonal
from pathsgd.training.capture import WARM_UP, AddressTable, CUDAGraph, capture, on_device

WARPS = 8
AT_ONCE = 1024
"""Chunks whose sums are added together."""
MAX_CAPTURED = 1 << 25
"""Entries of matrices up to which the launches of a step are captured: for larger ones they take no longer
than the GPU does, and a graph would keep the memory of their products."""
CAPTURED = ("momentum", "nesterov", "betas", "eps", "weight_decay", "growth")
"""Options that a graph has as constants."""
COMMON = ("nesterov", "betas", "eps")
"""Options that kernels are told once, so that groups cannot differ in them here."""


class _Chunks:
    """The chunks of some blocks."""

    def __init__(self, numbers: list[int], sizes: list[int], device: torch.device) -> None:
        starts = [torch.arange(0, sizes[k], CHUNK.value) for k in numbers]
        owners = torch.tensor(numbers).repeat_interleave(torch.tensor([len(own) for own in starts]))
        counts = [0, *accumulate(len(own) for own in starts)]

        def put(values: Tensor) -> Tensor:
            return values.to(device, torch.int32)

        self.chunks = put(torch.stack([owners, torch.cat(starts)], 1)).contiguous()
        self.firsts, self.numbers = put(torch.tensor(counts)), put(torch.tensor(numbers))
        self.partial = torch.zeros(len(owners), SUMS.value, dtype=torch.float64, device=device)

    def launch(self, kernel: Any, table: Tensor, *arguments: Any) -> None:
        kernel[len(self.chunks),](table, self.chunks, *arguments, num_warps=WARPS)

    def add_up(self, sums: Tensor, column: int, count: int) -> None:
        """Adds up some columns of what kernels found of chunks."""
        sum_kernel[len(self.numbers), count](self.partial, self.firsts, self.numbers, sums, column, AT_ONCE)


class KernelStep:
    """The kernels of one step, and the tables that they read.

    Args:
        table: of the blocks that are moved.
        state: the optimizer's.
        find_momenta: the momentum of each block.
        decide: from the products of ``RelativeStep.decide`` to what it returns.
    """

    def __init__(
        self,
        table: BlockTable,
        state: Mapping[Tensor, Any],
        find_momenta: Callable[[], Tensor],
        decide: Callable[[Tensor, float], tuple[Tensor, Tensor]],
    ) -> None:
        self.table, self.state, self.find_momenta, self.decide = table, state, find_momenta, decide
        self.is_supported = all(map(is_readable, table.moved)) and not any(table.shards)
        if not self.is_supported:
            return
        fields, self.offsets = [], []
        for block, owner in zip(table.blocks, table.owners, strict=True):
            side_by_side, gap, offset = _find_place(block, table.moved[owner])
            fields.append([0, 0, 0, 0, block.numel, side_by_side, gap, 0])
            self.offsets.append(4 * offset)
        sizes = [block.numel for block in table.blocks]
        others = [k for k in range(len(table.blocks)) if k not in set(table.orthogonal)]
        self.matrices = _Chunks(table.orthogonal, sizes, table.device) if table.orthogonal else None
        self.others = _Chunks(others, sizes, table.device) if others else None
        by_shape: dict[tuple[int, int], list[int]] = {}
        for k in table.orthogonal:
            by_shape.setdefault(table.blocks[k].matrix_shape, []).append(k)
        start, places = 0, []
        for (rows, columns), own in by_shape.items():
            places.append((start, (len(own), rows, columns)))
            for k in own:
                fields[k][7] = start
                start += rows * columns
        dtype = torch.bfloat16 if table.device.type == "cuda" else torch.float32
        self.moments = torch.empty(start, dtype=dtype, device=table.device)
        self.directions = self.moments.view(choose_dtype(self.moments))
        self.batches = [self.directions[at : at + math.prod(shape)].view(shape) for at, shape in places]
        diagonals = {min(batch.shape[1:]): make_diagonal(batch) for batch in self.batches}
        self.diagonals = [diagonals[min(batch.shape[1:])] for batch in self.batches]
        self.sums = torch.zeros(len(sizes), SUMS.value, dtype=torch.float64, device=table.device)
        assert len(fields[0]) == FIELDS.value
        self.addresses = AddressTable(torch.tensor(fields), table.device)
        self.steps, self.is_small = 0, start <= MAX_CAPTURED
        self.graph: CUDAGraph | None = None
        self.options: list[dict[str, Any]] = []
        self.rates: list[Tensor] = []

    def run(self) -> bool:
        """Takes the step, unless the kernels cannot."""
        table = self.table
        group, *groups = table.groups
        if (
            not self.is_supported
            or any(other[name] != group[name] for other in groups for name in COMMON)
            or not all(_is_like(p.grad, p) for p in table.moved)
        ):
            return False
        self._point()
        with on_device(table.device):
            self.steps += 1
            if self.is_small and self.steps > WARM_UP and table.device.type == "cuda" and not is_capturing():
                self._replay()
            else:
                self._launch()
        torch.autograd.graph.increment_version(table.moved)  # as torch does when it writes
        return True

    def _launch(self) -> None:
        group = self.table.groups[0]
        if self.matrices is not None:
            self._orthogonalize(self.matrices, group)
        if self.others is not None:
            first, second = group["betas"]
            rule = 1 - first, second, 1 - second, group["eps"]
            self.others.launch(adam_kernel, self.addresses.on_device, self.others.partial, *rule)
            self.others.add_up(self.sums, 0, 5)
        length, factor = self.decide(self.sums.T, torch.finfo(torch.float32).eps)
        ends = length.float(), factor.float()
        if self.matrices is not None:
            self.matrices.launch(move_kernel, self.addresses.on_device, self.directions, *ends)
        if self.others is not None:
            self.others.launch(move_adam_kernel, self.addresses.on_device, *ends, group["eps"])

    def _replay(self) -> None:
        """Runs _launch as a CUDA graph, which reads addresses from the table and rates from the device."""
        groups, device = self.table.groups, self.table.device
        options = [{k: v for k, v in group.items() if k in CAPTURED} for group in groups]
        rates = [group["lr"] for group in groups]
        if self.graph is None or options != self.options:
            self.rates = [torch.zeros((), device=device) for _ in groups]
            self.options = options
            for group, rate in zip(groups, self.rates, strict=True):
                group["lr"] = rate
            try:
                self.graph, _ = capture(self._launch, device)
            finally:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate
        for kept, rate in zip(self.rates, rates, strict=True):
            kept.copy_(rate) if isinstance(rate, Tensor) else kept.fill_(rate)
        self.graph.replay()

    def _orthogonalize(self, chunks: _Chunks, group: dict[str, Any]) -> None:
        rule = self.find_momenta().float(), group["nesterov"]
        chunks.launch(momentum_kernel, self.addresses.on_device, chunks.partial, self.moments, *rule)
        chunks.add_up(self.sums, 0, 5)
        chunks.launch(normalize_kernel, self.addresses.on_device, self.sums, self.moments, self.directions)
        for batch, diagonal in zip(self.batches, self.diagonals, strict=True):
            iterate(batch, diagonal, out=batch)
        chunks.launch(measure_kernel, self.addresses.on_device, chunks.partial, self.directions)
        chunks.add_up(self.sums, 3, 2)

    def _point(self) -> None:
        """Tells the kernels where everything lies now."""
        table, addresses = self.table, []
        matrices = set(table.matrices)
        for k, p in enumerate(table.moved):
            state = self.state[p]
            keys = ("momentum_buffer",) * 2 if k in matrices else ("exp_avg", "exp_avg_sq")
            addresses += [p.data_ptr(), p.grad.data_ptr(), *(state[key].data_ptr() for key in keys)]  # type: ignore[union-attr]
        owners, offsets = torch.tensor(table.owners), torch.tensor(self.offsets)[:, None]
        self.addresses.point(addresses, 4, lambda by_parameter: by_parameter[owners] + offsets)


def is_readable(p: Tensor) -> bool:
    """Whether kernels can read it: in fp32, its entries fill its memory, the rows one after the other."""
    if p.dtype != torch.float32 or p.numel() >= 1 << 31:
        return False
    sizes = sorted((stride, n) for stride, n in zip(p.stride(), p.shape, strict=True) if n > 1)
    expected = 1
    for stride, n in sizes:
        if stride != expected:
            return False
        expected *= n
    return p.dim() < 2 or len(p) == 1 or p.stride(0) == max(p.stride())


def _is_like(grad: Tensor | None, p: Tensor) -> bool:
    if grad is None or grad.layout != torch.strided or grad.dtype != p.dtype:
        return False
    # torch.compile gives 1x1 convolutions strides of its own along the axes of size 1.
    strides = zip(p.shape, p.stride(), grad.stride(), strict=True)
    return all(n == 1 or own == other for n, own, other in strides)


def _find_place(block: Block, p: Tensor) -> tuple[int, int, int]:
    """Number of its entries that lie side by side, and the distances from their last to the next and from the
    beginning of the parameter to the first."""
    if not block.shape or block.length == block.shape[block.axis]:
        return max(1, p.numel()), 0, 0
    if block.axis == 0:
        return block.numel, 0, block.start * p.stride(0)
    return block.length, p.shape[1] - block.length, block.start
