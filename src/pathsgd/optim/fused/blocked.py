"""The update on a CPU in torch operations: layer by layer, in blocks of rows that stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.geometry.range_check import safe_range
from pathsgd.optim.fused import torch_rules
from pathsgd.optim.fused.exponent_frame import ExponentFrame
from pathsgd.optim.fused.implementation import Launch, LayerTensors
from pathsgd.optim.rule import Rule, State, apply_momentum, apply_steps, gradients_to_z, single_tensor

BLOCK = 1 << 20
"""Entries of a block: a few such blocks stay in the cache that the cores share, and a call of torch costs
little beside one."""


@dataclass(frozen=True)
class StoredRoot:
    """The coordinates of a block whose ``1 / sqrt(gamma)`` is stored; see rule.InvariantCoordinates."""

    root: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.root.dtype

    def inverse_root(self) -> Tensor:
        return self.root

    def gradient_to_z(self, gradient: Tensor) -> Tensor:
        return gradient * self.root

    def step_from_z(self, step: Tensor) -> Tensor:
        return step * self.root


class Blocked:
    """See :class:`pathsgd.optim.fused.implementation.Implementation`."""

    def __init__(self, p: int, dtype: torch.dtype) -> None:
        self.p, self.dtype = p, dtype
        self.next_into: dict[int, Tensor] = {}
        self.next_out: dict[int, Tensor] = {}

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor], frame: ExponentFrame) -> None:
        self.frame = frame
        self._inverse: Tensor | None = None
        self.next_into = dict(enumerate(into))
        self.next_out = dict(enumerate(out))
        self.finish()

    def finish(self) -> None:
        # All vectors as one: each call of torch costs as much as the work on a few thousand numbers.
        vectors = [*self.next_into.values(), *self.next_out.values()]
        sums = torch.cat(vectors)
        inverse = inverse_root(sums, self.p)
        self._in_range, self._inverse = self._check_range(sums, self._inverse), inverse
        roots = inverse.split([len(v) for v in vectors])
        count, frame = len(self.next_into), self.frame
        self.into = dict(enumerate(roots[:count]))
        self.out = {k: _times(root, frame.root_factor(k)) for k, root in enumerate(roots[count:])}
        self.bias = {k: _times(root, frame.bias_root_factor(k)) for k, root in enumerate(roots[count:])}

    def run(self, layers: Sequence[LayerTensors], launch: Launch) -> None:
        launch(layers)

    def update(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        if layer.bias is not None and layer.bias_grad is not None:
            update_(layer.bias, layer.bias_grad, layer.bias_state, self.bias[k], layer.bias_rule)
        self._pass(k, layer, into, out, move=True)

    def sum_powers(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._pass(k, layer, into, out, move=False)

    def _pass(self, k: int, layer: LayerTensors, into: bool, out: bool, move: bool) -> None:
        step = max(BLOCK // max(layer.columns, 1), 1)
        scratch = layer.weight.new_empty(min(step, layer.rows), layer.columns, dtype=self.dtype)
        row_sums, column_sums = [], None
        for start in range(0, layer.rows, step):
            rows = slice(start, start + step)
            weight = layer.weight[rows]
            block = scratch[: len(weight)]
            if move:
                root = torch.mul(self.out[k][rows, None], self.into[k], out=block)
                state = tuple(s[rows] for s in layer.weight_state)
                update_(weight, layer.weight_grad[rows], state, root, layer.rule)
            if into or out:
                # Of the stored weights, which low precision has rounded.
                edges = _power_into(block, weight, self.p)
                if into:
                    row_sums.append(edges @ self.next_into[k])
                if out:
                    part = self.next_out[k][rows] @ edges
                    column_sums = part if column_sums is None else column_sums.add_(part)
        if row_sums:
            total = _times(torch.cat(row_sums), self.frame.into_factor(k))
            if layer.bias is not None:
                bias = _times(layer.bias.to(self.dtype), self.frame.bias_factor(k))
                total = total + _power_into(torch.empty_like(bias), bias, self.p)
            self.next_into[k + 1] = total
        if column_sums is not None:
            self.next_out[k - 1] = _times(column_sums, self.frame.out_factor(k))

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass

    def in_range(self, wait: bool = True) -> bool:
        return self._in_range

    def _check_range(self, sums: Tensor, before: Tensor | None) -> bool:
        """Sums must stay where plain floats lose nothing; a unit that was dead before may be zero."""
        if not sums.numel():
            return True
        _, low, high = safe_range(self.dtype)
        if before is not None and bool(((sums == 0) & (before > 0)).any()):
            return False
        return bool(torch.where(sums == 0, 1.0, sums).min() >= low) and bool(sums.max() <= high)


def update_(weight: Tensor, grad: Tensor, state: State, root: Tensor, rule: Rule) -> None:
    """One step of a tensor and its state, in place, given ``root = 1 / sqrt(gamma)`` (0 where gamma is 0)."""
    coordinates = [StoredRoot(root)]
    (h,) = gradients_to_z([grad], coordinates, single_tensor)
    if rule.maximize:
        h.neg_()
    live = root > 0 if rule.weight_decay and rule.decay != "all" else None
    if rule.coupled_decay:
        assert live is not None
        h.add_(torch.where(live, weight / root, 0), alpha=rule.coupled_decay)
    decay = rule.decoupled_decay if rule.decay == "all" else 0.0
    if rule.decoupled_decay and live is not None:
        weight.mul_(1 - live.to(root.dtype) * (rule.lr * rule.decoupled_decay))
    if rule.method == "sgd":
        (u,), _ = apply_momentum([h], list(state), rule.momentum, rule.nesterov, single_tensor)
        rate = float(rule.lr)
    else:
        u, rate = torch_rules.negative_step(h, state, rule), -1.0
    apply_steps([weight], [u], coordinates, [rate], decay, single_tensor)


def inverse_root(x: Tensor, p: int) -> Tensor:
    """``x^(-1/p)`` for p = 1, 2, 4, and 0 for a dead unit."""
    root = x if p == 1 else x.sqrt() if p == 2 else x.sqrt().sqrt()
    return torch.where(root > 0, 1 / root, 0)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _power_into(block: Tensor, weight: Tensor, p: int) -> Tensor:
    """``|weight|^p`` written into ``block``, in its precision."""
    if weight.dtype != block.dtype:
        weight = block.copy_(weight)
    if p == 1:
        return torch.abs(weight, out=block)
    torch.mul(weight, weight, out=block)
    return block if p == 2 else block.mul_(block)
