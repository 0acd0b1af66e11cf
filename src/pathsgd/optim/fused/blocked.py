"""The update on a CPU in torch operations: layer by layer, in blocks of rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pathsgd.geometry.range_check import safe_range
from pathsgd.optim.fused import torch_rules
from pathsgd.optim.fused.exponent_frame import ExponentFrame
from pathsgd.optim.fused.implementation import Launch, LayerTensors
from pathsgd.optim.rule import Rule, State, apply_momentum, single_tensor

BLOCK = 1 << 21
"""Entries of a block: large, so that the calls of torch cost little beside it."""
MOST_SHAPES = 64
"""Shapes of blocks that are kept."""
_scratch = threading.local()


class Blocked:
    """See :class:`pathsgd.optim.fused.implementation.Implementation`."""

    def __init__(self, p: int, dtype: torch.dtype) -> None:
        self.p, self.dtype = p, dtype

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor], frame: ExponentFrame) -> None:
        self.frame, self._lengths = frame, [len(vector) for vector in (*into, *out)]
        # All vectors as one, with views that are made once: each call of torch costs as much as the work on a
        # few thousand numbers.
        self._sums = torch.cat([*into, *out])
        self._inverse = torch.empty_like(self._sums)
        views = self._sums.split(self._lengths)
        self.next_into, self.next_out = views[: len(into)], views[len(into) :]
        self._roots: dict[bool, Roots] = {}
        self._invert(None)

    def finish(self) -> None:
        self._invert(self._inverse)

    def _invert(self, before: Tensor | None) -> None:
        self._in_range, self._all_live = self._check_range(before)
        inverse_root(self._sums, self.p, self._all_live, out=self._inverse)
        self._current: set[bool] = set()

    def roots(self, plain: bool) -> Roots:
        """What a step multiplies by: ``gamma^(-1/2)``, or ``1 / gamma`` for a plain rule."""
        if plain not in self._roots:
            self._roots[plain] = Roots(self._lengths, self.frame, self.dtype, power=2 if plain else 1)
        if plain not in self._current:
            self._roots[plain].fill(self._inverse)
            self._current.add(plain)
        return self._roots[plain]

    def run(self, layers: Sequence[LayerTensors], launch: Launch) -> None:
        launch(layers)

    def update(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        if layer.bias is not None and layer.bias_grad is not None:
            root, rule = self.roots(is_plain(layer.bias_rule)).bias[k], layer.bias_rule
            update_(layer.bias, layer.bias_grad, layer.bias_state, root, rule, all_live=self._all_live)
        self._pass(k, layer, into, out, move=True)

    def sum_powers(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._pass(k, layer, into, out, move=False)

    def _pass(self, k: int, layer: LayerTensors, into: bool, out: bool, move: bool) -> None:
        step = max(BLOCK // max(layer.columns, 1), 1)
        scratch = take_scratch(min(step, layer.rows), layer.columns, self.dtype)
        if move:
            roots = self.roots(is_plain(layer.rule))
            head, tail = roots.out[k], roots.into[k]
            all_live = self._all_live or (bool((head > 0).all()) and bool((tail > 0).all()))
        for start in range(0, layer.rows, step):
            weight, (block, *buffers) = layer.weight, scratch
            rows: slice | None = None
            if layer.rows > step:
                rows = slice(start, start + step)
                weight = weight[rows]
                block, *buffers = (buffer[: len(weight)] for buffer in scratch)
            if move:
                root = torch.mul(_rows(head, rows), tail, out=block)
                state = tuple(_rows(s, rows) for s in layer.weight_state)
                grad = _rows(layer.weight_grad, rows)
                update_(weight, grad, state, root, layer.rule, buffers, all_live)
            if into or out:
                # Of the stored weights, which low precision has rounded.
                edges = _power_into(block, weight, self.p)
                if into:
                    torch.mv(edges, self.next_into[k], out=_rows(self.next_into[k + 1], rows))
                if out and start == 0:
                    torch.mv(edges.t(), _rows(self.next_out[k], rows), out=self.next_out[k - 1])
                elif out:
                    self.next_out[k - 1].addmv_(edges.t(), _rows(self.next_out[k], rows))
        if into:
            total = _multiply(self.next_into[k + 1], self.frame.into_factor(k))
            if layer.bias is not None:
                bias = _times(layer.bias.to(self.dtype), self.frame.bias_factor(k))
                _add_power(total, bias, self.p)
        if out:
            _multiply(self.next_out[k - 1], self.frame.out_factor(k))

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass

    def in_range(self, wait: bool = True) -> bool:
        return self._in_range

    def _check_range(self, before: Tensor | None) -> tuple[bool, bool]:
        """(whether the sums are where plain floats lose nothing, whether none is zero); a unit that was dead
        before may be zero."""
        sums = self._sums
        if not sums.numel():
            return True, True
        _, low, high = safe_range(self.dtype)
        least, most = (float(x) for x in sums.aminmax())
        if least != 0:
            return low <= least and most <= high, least > 0
        if before is not None and bool(((sums == 0) & (before > 0)).any()):
            return False, False
        return bool(torch.where(sums == 0, 1.0, sums).min() >= low) and most <= high, False


class Roots:
    """The inverse roots of all vectors, or their squares: one number for each input and output of a layer."""

    def __init__(self, lengths: Sequence[int], frame: ExponentFrame, dtype: torch.dtype, power: int) -> None:
        self.power, count = power, len(lengths) // 2
        self._whole = torch.empty(sum(lengths), dtype=dtype, device="cpu")
        views = self._whole.split(list(lengths))
        self.into, out = views[:count], views[count:]
        self._bias_factors = [frame.bias_root_factor(k) ** power for k in range(count)]
        self._factors = [frame.root_factor(k) ** power for k in range(count)]
        self.bias = [
            torch.empty_like(x) if f != g else x
            for x, f, g in zip(out, self._factors, self._bias_factors, strict=True)
        ]
        """Of the biases, whose gamma_in is 1."""
        self.out = [x.unsqueeze(1) for x in out]

    def fill(self, inverse: Tensor) -> None:
        if self.power == 2:
            torch.mul(inverse, inverse, out=self._whole)
        else:
            self._whole.copy_(inverse)
        for out, factor, bias, bias_factor in zip(
            self.out, self._factors, self.bias, self._bias_factors, strict=True
        ):
            if factor != bias_factor:
                torch.mul(out.squeeze(1), bias_factor, out=bias)
            _multiply(out, factor)


def update_(
    weight: Tensor,
    grad: Tensor,
    state: State,
    root: Tensor,
    rule: Rule,
    buffers: Sequence[Tensor] = (),
    all_live: bool = False,
) -> None:
    """One step of a tensor and its state, in place, given ``root = 1 / sqrt(gamma)``, 0 where gamma is 0. For
    a plain rule it is ``1 / gamma``, which saves a pass.

    ``buffers`` are two tensors of the weight's shape to compute in; ``all_live`` says that no gamma is 0.
    """
    lr, decay = float(rule.lr), rule.decoupled_decay
    if decay and rule.decay == "live" and not all_live:
        weight.mul_(1 - (root > 0).to(root.dtype) * (rule.lr * decay))
    elif decay:
        weight.mul_(1 - lr * decay)
    if is_plain(rule):
        _move(weight, grad, root, lr if rule.maximize else -lr)
        return
    momentum_alone = rule.method == "sgd" and not rule.nesterov and not rule.coupled_decay
    if momentum_alone and state[0].dtype == grad.dtype == root.dtype:
        # apply_momentum in two passes: h is not stored.
        _move(state[0].mul_(rule.momentum), grad, root, -1.0 if rule.maximize else 1.0)
        _move(weight, state[0], root, -lr)
        return
    h = torch.mul(grad, root, out=buffers[0] if buffers else None)
    if rule.maximize:
        h.neg_()
    if rule.coupled_decay:
        h.add_(torch.where(root > 0, weight / root, 0), alpha=rule.coupled_decay)
    if rule.method == "sgd":
        (u,), _ = apply_momentum([h], list(state), rule.momentum, rule.nesterov, _overwrite)
        _move(weight, u, root, -lr)
        return
    z = buffers[1].zero_() if buffers else torch.zeros_like(root)
    torch_rules.step_from_zero_(z, h, state, rule)
    _move(weight, z, root, 1.0)


def _overwrite(operation: str, *arguments: Any, **options: Any) -> list[Tensor]:
    """Operations on lists of one tensor, always in place: allocating takes as long as computing."""
    return single_tensor(operation.rstrip("_") + "_", *arguments, **options)


def _move(weight: Tensor, u: Tensor, root: Tensor, rate: float) -> None:
    """``w + rate u / sqrt(gamma)``, computed in the precision of gamma."""
    if weight.dtype == u.dtype == root.dtype:
        weight.addcmul_(u, root, value=rate)
    else:
        weight.add_((rate * (u.to(root.dtype) * root)).to(weight.dtype))


def take_scratch(rows: int, columns: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """Three blocks to compute in, kept for all steps of a thread: to allocate them anew takes as long as half
    a step. With fp32 they take 24 MB at most, or three rows of a layer."""
    count, kept = 3 * rows * columns, getattr(_scratch, "memory", None)
    if kept is None or kept.dtype != dtype or kept.numel() < count:
        _scratch.memory = kept = torch.empty(count, dtype=dtype, device="cpu")
        _scratch.blocks = {}
    blocks: dict[tuple[int, int], Sequence[Tensor]] = _scratch.blocks
    if (rows, columns) not in blocks:
        if len(blocks) == MOST_SHAPES:
            blocks.clear()
        blocks[rows, columns] = kept[:count].view(3, rows, columns).unbind()
    return blocks[rows, columns]


def is_plain(rule: Rule) -> bool:
    """Whether a step is the paper's ``w - lr g / gamma``."""
    return rule.method == "sgd" and not rule.momentum and not rule.coupled_decay


def inverse_root(x: Tensor, p: int, all_live: bool, out: Tensor) -> None:
    """``x^(-1/p)`` for p = 1, 2, 4, and 0 for a dead unit."""
    root = x if p == 1 else torch.sqrt(x, out=out)
    if p == 4:
        root.sqrt_()
    if all_live:
        torch.reciprocal(root, out=out)
    else:
        out.copy_(torch.where(root > 0, 1 / root, 0))


def _rows(x: Tensor, rows: slice | None) -> Tensor:
    return x if rows is None else x[rows]


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _multiply(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x.mul_(factor)


def _add_power(total: Tensor, bias: Tensor, p: int) -> None:
    """Adds ``|bias|^p`` in place."""
    if p == 2:
        total.addcmul_(bias, bias)
    else:
        total.add_(_power_into(torch.empty_like(bias), bias, p))


def _power_into(block: Tensor, weight: Tensor, p: int) -> Tensor:
    """``|weight|^p`` written into ``block``, in its precision."""
    if weight.dtype != block.dtype:
        weight = block.copy_(weight)
    if p == 1:
        return torch.abs(weight, out=block)
    torch.mul(weight, weight, out=block)
    return block if p == 2 else block.mul_(block)
