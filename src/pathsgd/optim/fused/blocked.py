"""The update on a CPU in torch operations: layer by layer, in blocks of rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathsgd.geometry.range_check import safe_range
from pathsgd.optim.fused import torch_rules
from pathsgd.optim.fused.exponent_frame import ExponentFrame
from pathsgd.optim.fused.implementation import Launch, LayerTensors
from pathsgd.optim.rule import Each, Rule, State, apply_momentum, apply_steps, gradients_to_z, single_tensor

BLOCK = 1 << 21
"""Entries of a block: large, so that the calls of torch cost little beside it."""
_scratch = threading.local()


@dataclass(frozen=True)
class StoredRoot:
    """The coordinates of a block whose ``1 / sqrt(gamma)`` is stored; see rule.InvariantCoordinates."""

    root: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.root.dtype

    def inverse_root(self) -> tuple[Tensor, None]:
        return self.root, None

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
            root = self.bias[k].square() if is_plain(layer.bias_rule) else self.bias[k]
            update_(layer.bias, layer.bias_grad, layer.bias_state, root, layer.bias_rule)
        self._pass(k, layer, into, out, move=True)

    def sum_powers(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._pass(k, layer, into, out, move=False)

    def _pass(self, k: int, layer: LayerTensors, into: bool, out: bool, move: bool) -> None:
        step = max(BLOCK // max(layer.columns, 1), 1)
        scratch = take_scratch(min(step, layer.rows), layer.columns, self.dtype)
        head, tail = self.out[k], self.into[k]
        all_live = bool((head > 0).all()) and bool((tail > 0).all())
        if is_plain(layer.rule):
            head, tail = head * head, tail * tail
        row_sums, column_sums = [], None
        for start in range(0, layer.rows, step):
            rows = slice(start, start + step)
            weight = layer.weight[rows]
            block, *buffers = scratch[:, : len(weight)]
            if move:
                root = torch.mul(head[rows, None], tail, out=block)
                state = tuple(s[rows] for s in layer.weight_state)
                update_(weight, layer.weight_grad[rows], state, root, layer.rule, buffers, all_live)
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

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

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


def update_(
    weight: Tensor,
    grad: Tensor,
    state: State,
    root: Tensor,
    rule: Rule,
    buffers: Sequence[Tensor] | None = None,
    all_live: bool = False,
) -> None:
    """One step of a tensor and its state, in place, given ``root = 1 / sqrt(gamma)``, 0 where gamma is 0. For
    a plain rule it is ``1 / gamma``, which saves a pass.

    ``buffers`` are two tensors of the weight's shape to compute in; ``all_live`` says that no gamma is 0.
    """
    h_buffer, z = buffers or (torch.empty_like(root), torch.empty_like(root))
    coordinates, each = [StoredRoot(root)], _write_into(h_buffer)
    decay = rule.decoupled_decay
    if decay and rule.decay == "live" and not all_live:
        weight.mul_(1 - (root > 0).to(root.dtype) * (rule.lr * decay))
        decay = 0.0
    lr = float(rule.lr)
    if is_plain(rule):
        apply_steps([weight], [-grad if rule.maximize else grad], coordinates, [lr], decay, each)
        return
    (h,) = gradients_to_z([grad], coordinates, each)
    if rule.maximize:
        h.neg_()
    if rule.coupled_decay:
        h.add_(torch.where(root > 0, weight / root, 0), alpha=rule.coupled_decay)
    if rule.method == "sgd":
        (u,), _ = apply_momentum([h], list(state), rule.momentum, rule.nesterov, each)
        apply_steps([weight], [u], coordinates, [lr], decay, each)
        return
    if decay:
        weight.mul_(1 - lr * decay)
    torch_rules.step_from_zero_(z.zero_(), h, state, rule)
    apply_steps([weight], [z], coordinates, [-1.0], 0.0, each)


def take_scratch(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Three blocks to compute in, kept for all steps of a thread: to allocate them anew takes as long as half
    a step. With fp32 they take 24 MB at most, or three rows of a layer."""
    count, kept = 3 * rows * columns, getattr(_scratch, "blocks", None)
    if kept is None or kept.dtype != dtype or kept.numel() < count:
        _scratch.blocks = kept = torch.empty(count, dtype=dtype, device="cpu")
    return kept[:count].view(3, rows, columns)


def is_plain(rule: Rule) -> bool:
    """Whether a step is the paper's ``w - lr g / gamma``."""
    return rule.method == "sgd" and not rule.momentum and not rule.coupled_decay


def _write_into(buffer: Tensor) -> Each:
    """Operations on lists of one tensor, whose new values go into a buffer: allocating takes as long as
    computing."""

    def each(operation: str, tensors: Sequence[Tensor], *others: Any, **options: Any) -> list[Tensor]:
        if operation.endswith("_") or tensors[0].dtype != buffer.dtype:
            return single_tensor(operation, tensors, *others, **options)
        arguments = [other[0] if isinstance(other, list) else other for other in others]
        return [getattr(torch, operation)(tensors[0], *arguments, **options, out=buffer)]

    return each


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
