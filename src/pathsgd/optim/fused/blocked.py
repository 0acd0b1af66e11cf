"""The update in torch operations, for any device: layer by layer, in blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pathsgd.geometry.range_check import safe_range
from pathsgd.optim.fused.exponent_frame import Frame, plain_frame
from pathsgd.optim.fused.implementation import Launch, LayerTensors
from pathsgd.optim.rule import State, inverse_root, moved, powered

BLOCK = 1 << 20
"""Entries of a block: a few such blocks stay in the cache that the cores share, and a call of torch costs
little beside one."""


class Plain:
    """Needs no compiler."""

    def __init__(self, p: int, dtype: torch.dtype) -> None:
        self.p, self.dtype = p, dtype
        self.next_into: dict[int, Tensor] = {}
        self.next_out: dict[int, Tensor] = {}

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor], frame: Frame | None = None) -> None:
        self.frame = frame or plain_frame(len(into), self.p)
        self._inverse: Tensor | None = None
        self.next_into = dict(enumerate(into))
        self.next_out = dict(enumerate(out))
        self.finish()

    def finish(self) -> None:
        # All vectors as one: each call of torch costs as much as the work on a few thousand numbers.
        vectors = [*self.next_into.values(), *self.next_out.values()]
        sums = torch.cat(vectors)
        inverse = inverse_root(sums, self.p)
        self._in_range, self._inverse = self._check(sums, self._inverse), inverse
        roots = inverse.split([len(v) for v in vectors])
        count, frame = len(self.next_into), self.frame
        self.into = dict(enumerate(roots[:count]))
        self.out = {k: _times(root, frame.scale(k)) for k, root in enumerate(roots[count:])}
        self.bias = {k: _times(root, frame.bias_scale(k)) for k, root in enumerate(roots[count:])}

    def run(self, layers: Sequence[LayerTensors], launch: Launch) -> None:
        launch(layers)

    def update(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._move_bias(k, layer)
        self._pass(k, layer, into, out, move=True)

    def sums(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._pass(k, layer, into, out, move=False)

    def _pass(self, k: int, layer: LayerTensors, into: bool, out: bool, move: bool) -> None:
        step = max(BLOCK // max(layer.columns, 1), 1)
        scratch = torch.empty(
            min(step, layer.rows), layer.columns, dtype=self.dtype, device=layer.weight.device
        )
        row_parts, column_sums = [], None
        for start in range(0, layer.rows, step):
            rows = slice(start, start + step)
            weight = layer.weight[rows]
            block = scratch[: len(weight)]
            if move:
                self._move(k, rows, layer, block)
            if into or out:
                # Of what was stored, which in low precision is not what was computed.
                edges = _powered_into(block, weight, self.p)
                if into:
                    row_parts.append(edges @ self.next_into[k])
                if out:
                    part = self.next_out[k][rows] @ edges
                    column_sums = part if column_sums is None else column_sums.add_(part)
        self._keep(k, layer, row_parts, column_sums)

    def _move(self, k: int, rows: slice, layer: LayerTensors, block: Tensor) -> None:
        if layer.rule.method == "sgd" and not layer.rule.coupled:
            self._move_by_sgd(k, rows, layer, block)
            return
        scale = torch.mul(self.out[k][rows, None], self.into[k], out=block)
        state = tuple(s[rows] for s in layer.weight_state)
        _write(
            layer.weight[rows],
            state,
            moved(layer.weight[rows], layer.weight_grad[rows], state, scale, layer.rule),
        )

    def _move_by_sgd(self, k: int, rows: slice, layer: LayerTensors, block: Tensor) -> None:
        """The formulas of rule.py, written so that few passes over a block are made."""
        rule = layer.rule
        weight, grad = layer.weight[rows], layer.weight_grad[rows]
        tail, head = self.into[k], self.out[k][rows, None]
        if not layer.weight_state:
            torch.mul(grad, tail * tail, out=block)
            block.mul_(head * head * (-rule.lr * rule.sign))
        else:
            momentum = layer.weight_state[0][rows]
            torch.mul(grad, tail, out=block)
            block.mul_(head * rule.sign)
            momentum.mul_(rule.momentum).add_(block)
            step = block.add_(momentum, alpha=rule.momentum) if rule.nesterov else momentum
            torch.mul(step, tail, out=block)
            block.mul_(head * -rule.lr)
        if rule.weight_decay and rule.decay == "live":
            live = ((head > 0) & (tail > 0)).to(block.dtype)
            weight.mul_(1 - live * (rule.lr * rule.weight_decay))
        elif rule.weight_decay:
            weight.mul_(rule.shrink())
        weight.add_(block)

    def _move_bias(self, k: int, layer: LayerTensors) -> None:
        if layer.bias is None:
            return
        assert layer.bias_grad is not None
        state = layer.bias_state
        _write(layer.bias, state, moved(layer.bias, layer.bias_grad, state, self.bias[k], layer.bias_rule))

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass

    def in_range(self) -> bool:
        return self._in_range

    def trusted(self) -> bool:
        return self._in_range

    def _keep(self, k: int, layer: LayerTensors, row_parts: list[Tensor], column_sums: Tensor | None) -> None:
        if row_parts:
            parts = row_parts[0] if len(row_parts) == 1 else torch.cat(row_parts)
            total = _times(parts, self.frame.into_factor(k))
            if layer.bias is not None:
                bias = _times(layer.bias.to(self.dtype), self.frame.bias_factor(k))
                total = total + powered(bias, self.p)
            self.next_into[k + 1] = total
        if column_sums is not None:
            self.next_out[k - 1] = _times(column_sums, self.frame.out_factor(k))

    def _check(self, sums: Tensor, before: Tensor | None) -> bool:
        """Sums must stay where plain floats lose nothing; a unit that was dead before counts as such."""
        if not sums.numel():
            return True
        _, low, high = safe_range(self.dtype)
        if before is not None and bool(((sums == 0) & (before > 0)).any()):
            return False
        return bool(torch.where(sums == 0, 1.0, sums).min() >= low) and bool(sums.max() <= high)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _write(weight: Tensor, state: State, new: tuple[Tensor, State]) -> None:
    weight.copy_(new[0])
    for kept, value in zip(state, new[1], strict=True):
        kept.copy_(value)


def _powered_into(block: Tensor, weight: Tensor, p: int) -> Tensor:
    """``|weight|^p`` written into ``block``, in its precision."""
    if weight.dtype != block.dtype:
        weight = block.copy_(weight)
    if p == 1:
        return torch.abs(weight, out=block)
    torch.mul(weight, weight, out=block)
    return block if p == 2 else block.mul_(block)
