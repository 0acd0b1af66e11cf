"""The update in torch operations, for any device: layer by layer, in blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pathsgd.geometry.range import safe_range
from pathsgd.optim.kernels.layer import LayerTensors, Rule, inverse_root, moved, powered

BLOCK = 1 << 16
"""Entries of a block: a few such blocks of fp32 stay in a core's own cache."""


class Plain:
    """The readable implementation. ``block=None`` takes every layer in one piece."""

    def __init__(self, p: int, dtype: torch.dtype, block: int | None = BLOCK) -> None:
        self.p, self.dtype, self.block = p, dtype, block
        self.next_into: dict[int, Tensor] = {}
        self.next_out: dict[int, Tensor] = {}

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        self.next_into = dict(enumerate(into))
        self.next_out = dict(enumerate(out))
        self.finish()

    def finish(self) -> None:
        self.into = {k: inverse_root(x, self.p) for k, x in self.next_into.items()}
        self.out = {k: inverse_root(x, self.p) for k, x in self.next_out.items()}
        self._in_range = self._check()

    def update(self, k: int, layer: LayerTensors, rule: Rule, *, into: bool, out: bool) -> None:
        if layer.bias is not None:
            assert layer.bias_grad is not None
            bias, momentum = moved(layer.bias, layer.bias_grad, layer.bias_momentum, self.out[k], rule)
            layer.bias.copy_(bias)
            if layer.bias_momentum is not None and momentum is not None:
                layer.bias_momentum.copy_(momentum)
        row_parts, column_sums = [], None
        for rows in self._blocks(layer):
            weight = layer.weight[rows]
            old = None if layer.weight_momentum is None else layer.weight_momentum[rows]
            scale = self.out[k][rows, None] * self.into[k]
            new, momentum = moved(weight, layer.weight_grad[rows], old, scale, rule)
            weight.copy_(new)
            if old is not None and momentum is not None:
                old.copy_(momentum)
            if into or out:
                # What was stored, which in low precision is not what was computed.
                edges = powered(weight.to(self.dtype), self.p)
                if into:
                    row_parts.append(edges @ self.next_into[k])
                if out:
                    part = self.next_out[k][rows] @ edges
                    column_sums = part if column_sums is None else column_sums + part
        self._keep(k, layer, row_parts, column_sums)

    def sums(self, k: int, layer: LayerTensors, rule: Rule, *, into: bool, out: bool) -> None:
        row_parts, column_sums = [], None
        for rows in self._blocks(layer):
            edges = powered(layer.weight[rows].to(self.dtype), self.p)
            if into:
                row_parts.append(edges @ self.next_into[k])
            if out:
                part = self.next_out[k][rows] @ edges
                column_sums = part if column_sums is None else column_sums + part
        self._keep(k, layer, row_parts, column_sums)

    def trusted(self) -> bool:
        return self._in_range

    def _keep(self, k: int, layer: LayerTensors, row_parts: list[Tensor], column_sums: Tensor | None) -> None:
        if row_parts:
            total = torch.cat(row_parts)
            if layer.bias is not None:
                total = total + powered(layer.bias.to(self.dtype), self.p)
            self.next_into[k + 1] = total
        if column_sums is not None:
            self.next_out[k - 1] = column_sums

    def _blocks(self, layer: LayerTensors) -> Iterator[slice]:
        step = layer.rows if self.block is None else max(self.block // max(layer.columns, 1), 1)
        for start in range(0, layer.rows, max(step, 1)):
            yield slice(start, min(start + step, layer.rows))

    def _check(self) -> bool:
        """Sums must stay where plain floats lose nothing; a unit that is dead counts as such."""
        _, low, high = safe_range(self.dtype)
        sums = torch.cat([*self.next_into.values(), *self.next_out.values()])
        alive = sums[sums != 0]
        if not alive.numel():
            return True
        least, largest = torch.aminmax(alive)
        return bool(least >= low) and bool(largest <= high)
