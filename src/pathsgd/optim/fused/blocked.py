"""The update on a CPU in torch operations: a small chain at once, a large one in blocks of rows."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pathsgd import _torch
from pathsgd.geometry.range_check import safe_range
from pathsgd.optim.fused import torch_rules
from pathsgd.optim.fused.exponent_frame import ExponentFrame
from pathsgd.optim.fused.implementation import Launch, LayerTensors
from pathsgd.optim.rule import Rule, State, apply_momentum, multi_tensor

BLOCK = 1 << 21
"""Entries of a block: large, so that the calls of torch cost little beside it."""
MOST_SHAPES = 64
"""Lists of shapes whose blocks are kept."""
_scratch = threading.local()


class Blocked:
    """See :class:`pathsgd.optim.fused.implementation.Implementation`."""

    def __init__(self, p: int, dtype: torch.dtype) -> None:
        self.p, self.dtype = p, dtype
        self._moved = False

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor], frame: ExponentFrame) -> None:
        self.frame, self._lengths = frame, [len(vector) for vector in (*into, *out)]
        # All vectors as one, with views that are made once: each call of torch costs as much as the work on a
        # few thousand numbers.
        self._sums = torch.cat([*into, *out])
        views = self._sums.split(self._lengths)
        self.next_into, self.next_out = views[: len(into)], views[len(into) :]
        # No step changes gamma_in of what a chain reads and gamma_out of what it returns.
        self._begins_at_one, self._ends_at_one = bool((into[0] == 1).all()), bool((out[-1] == 1).all())
        self._roots: dict[bool, Roots] = {}
        self._current: set[bool] = set()
        self._dead: Tensor | None = None
        self._in_range = self._check_range(first=True)

    def finish(self) -> None:
        self._in_range = self._check_range(first=False)
        self._current.clear()

    def roots(self, rule: Rule) -> Roots:
        """What a step multiplies by: ``gamma^(-1/2)``, or ``1 / gamma`` for a plain rule."""
        plain = is_plain(rule)
        if plain not in self._roots:
            self._roots[plain] = Roots(self._lengths, self.frame, self.dtype, power=2 if plain else 1)
        if plain not in self._current:
            self._roots[plain].fill(self._sums, self.p, self._dead)
            self._current.add(plain)
        return self._roots[plain]

    def run(self, layers: Sequence[LayerTensors], launch: Launch) -> None:
        self._moved = sum(layer.weight.numel() for layer in layers) <= BLOCK
        if self._moved:
            self._move_together(layers)
        launch(layers)
        self._moved = False

    def _move_together(self, layers: Sequence[LayerTensors]) -> None:
        """Moves all layers by the calls of torch that one would take."""
        tensors = [t for layer in layers for t in (layer.weight, layer.bias) if t is not None]
        blocks = iter(take_scratch(tensors, self.dtype))
        parts: dict[int, tuple[Rule, list[Part]]] = {}
        for k, layer in enumerate(layers):
            part = self._weight_part(k, layer, None, next(blocks))
            parts.setdefault(id(layer.rule), (layer.rule, []))[1].append(part)
            if layer.bias is not None:
                part = self._bias_part(k, layer, next(blocks))
                parts.setdefault(id(layer.bias_rule), (layer.bias_rule, []))[1].append(part)
        for rule, own in parts.values():
            update_(own, rule, all_live=self._dead is None)

    def update(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        if self._moved:
            self.sum_powers(k, layer, into=into, out=out)
            return
        if layer.bias is not None:
            part = self._bias_part(k, layer, *take_scratch([layer.bias], self.dtype))
            update_([part], layer.bias_rule, all_live=self._dead is None)
        for rows in _blocks(layer):
            weight = _rows(layer.weight, rows)
            part = self._weight_part(k, layer, rows, *take_scratch([weight], self.dtype))
            update_([part], layer.rule, all_live=self._dead is None)
            self._sum_rows(k, weight, rows, into, out)
        self._close_sums(k, layer, into, out)

    def _weight_part(self, k: int, layer: LayerTensors, rows: slice | None, scratch: Scratch) -> Part:
        roots = self.roots(layer.rule)
        head, tail = _rows(roots.out[k], rows), roots.into[k]
        if k == 0 and self._begins_at_one:
            root = head
        elif k == len(roots.out) - 1 and self._ends_at_one and roots.factors[k] == 1:
            root = tail
        else:
            root = torch.mul(head, tail, out=scratch.block)
        state = layer.weight_state if rows is None else tuple(s[rows] for s in layer.weight_state)
        return Part(_rows(layer.weight, rows), _rows(layer.weight_grad, rows), state, root, scratch)

    def _bias_part(self, k: int, layer: LayerTensors, scratch: Scratch) -> Part:
        assert layer.bias is not None
        assert layer.bias_grad is not None
        root = self.roots(layer.bias_rule).bias[k]
        return Part(layer.bias, layer.bias_grad, layer.bias_state, root, scratch)

    def sum_powers(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        for rows in _blocks(layer):
            self._sum_rows(k, _rows(layer.weight, rows), rows, into, out)
        self._close_sums(k, layer, into, out)

    def _sum_rows(self, k: int, weight: Tensor, rows: slice | None, into: bool, out: bool) -> None:
        """Of the stored weights, which low precision has rounded."""
        if into and k == 0 and self._begins_at_one and self.p == 2:
            total = _rows(self.next_into[1], rows)
            torch.linalg.vector_norm(weight, dim=1, dtype=self.dtype, out=total).square_()
        elif into or out:
            (scratch,) = take_scratch([weight], self.dtype)
            edges = _power_into(scratch.block, weight, self.p)
            if into:
                torch.mv(edges, self.next_into[k], out=_rows(self.next_into[k + 1], rows))
            if out and (rows is None or rows.start == 0):
                torch.mv(scratch.transposed, _rows(self.next_out[k], rows), out=self.next_out[k - 1])
            elif out:
                self.next_out[k - 1].addmv_(scratch.transposed, _rows(self.next_out[k], rows))

    def _close_sums(self, k: int, layer: LayerTensors, into: bool, out: bool) -> None:
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

    def _check_range(self, first: bool) -> bool:
        """Whether the sums are where plain floats lose nothing; a unit that was dead before may be zero."""
        sums, before, self._dead = self._sums, self._dead, None
        if not sums.numel():
            return True
        _, low, high = safe_range(self.dtype)
        least, most = (float(x) for x in sums.aminmax())
        if least > 0:
            return low <= least and most <= high
        self._dead = ~(sums > 0)
        if not first and bool((self._dead if before is None else self._dead & ~before).any()):
            return False
        return bool(torch.where(self._dead, 1.0, sums).min() >= low) and most <= high


class Roots:
    """The inverse roots of all vectors, or their squares: one number for each input and output of a layer."""

    def __init__(self, lengths: Sequence[int], frame: ExponentFrame, dtype: torch.dtype, power: int) -> None:
        self.power, count = power, len(lengths) // 2
        self._whole = torch.empty(sum(lengths), dtype=dtype, device="cpu")
        views = self._whole.split(list(lengths))
        self.into, out = views[:count], views[count:]
        self._bias_factors = [frame.bias_root_factor(k) ** power for k in range(count)]
        self.factors = [frame.root_factor(k) ** power for k in range(count)]
        self.bias = [
            torch.empty_like(x) if f != g else x
            for x, f, g in zip(out, self.factors, self._bias_factors, strict=True)
        ]
        """Of the biases, whose gamma_in is 1."""
        self.out = [x.unsqueeze(1) for x in out]

    def fill(self, sums: Tensor, p: int, dead: Tensor | None) -> None:
        """From the sums, of which those that are not positive are ``dead``."""
        inverse_power(sums, self.power, p, out=self._whole)
        if dead is not None:
            self._whole.masked_fill_(dead, 0)
        for out, factor, bias, bias_factor in zip(
            self.out, self.factors, self.bias, self._bias_factors, strict=True
        ):
            if factor != bias_factor:
                torch.mul(out.squeeze(1), bias_factor, out=bias)
            _multiply(out, factor)


class Scratch(NamedTuple):
    """Tensors of one shape to compute in."""

    block: Tensor
    transposed: Tensor
    """The block, transposed."""
    h: Tensor
    z: Tensor


class Part(NamedTuple):
    """A tensor, or rows of one, with what moves it."""

    weight: Tensor
    grad: Tensor
    state: State
    root: Tensor
    """``1 / sqrt(gamma)``, 0 where gamma is 0, of the weight's shape or one that expands to it. For a plain
    rule it is ``1 / gamma``, which saves a pass."""
    scratch: Scratch


def update_(parts: Sequence[Part], rule: Rule, all_live: bool = False) -> None:
    """One step of these tensors and their state, in place; ``all_live`` says that no gamma is 0."""
    weights, grads = [part.weight for part in parts], [part.grad for part in parts]
    roots = [part.root for part in parts]
    lr, decay = float(rule.lr), rule.decoupled_decay
    if decay and rule.decay == "live" and not all_live:
        for weight, root in zip(weights, roots, strict=True):
            weight.mul_(1 - (root > 0).to(root.dtype) * (rule.lr * decay))
    elif decay:
        _torch.foreach("mul_", weights, 1 - lr * decay)
    if is_plain(rule):
        _move(weights, grads, roots, lr if rule.maximize else -lr)
        return
    states = [[*own] for own in zip(*(part.state for part in parts), strict=True)]
    momentum_alone = rule.method == "sgd" and not rule.nesterov and not rule.coupled_decay
    if momentum_alone and _are_alike(*states, grads, roots):
        # apply_momentum in two passes: h is not stored.
        _torch.foreach("mul_", states[0], rule.momentum)
        _move(states[0], grads, roots, -1.0 if rule.maximize else 1.0)
        _move(weights, states[0], roots, -lr)
        return
    hs = [torch.mul(grad, root, out=scratch.h) for _, grad, _, root, scratch in parts]
    if rule.maximize:
        _torch.foreach("neg_", hs)
    if rule.coupled_decay:
        for h, weight, root in zip(hs, weights, roots, strict=True):
            h.add_(torch.where(root > 0, weight / root, 0), alpha=rule.coupled_decay)
    if rule.method == "sgd":
        us, _ = apply_momentum(hs, states[0], rule.momentum, rule.nesterov, _overwrite)
        _move(weights, us, roots, -lr)
        return
    zs = [part.scratch.z for part in parts]
    _torch.foreach("zero_", zs)
    torch_rules.step_from_zero_(zs, hs, states, rule)
    _move(weights, zs, roots, 1.0)


def _overwrite(operation: str, *arguments: Any, **options: Any) -> list[Tensor]:
    """Operations on lists, always in place: allocating takes as long as computing."""
    return multi_tensor(operation.rstrip("_") + "_", *arguments, **options)


def _move(weights: list[Tensor], us: list[Tensor], roots: list[Tensor], rate: float) -> None:
    """``w + rate u / sqrt(gamma)``, computed in the precision of gamma."""
    if _are_alike(weights, us, roots):
        _torch.foreach("addcmul_", weights, us, roots, value=rate)
        return
    for weight, u, root in zip(weights, us, roots, strict=True):
        weight.add_((rate * (u.to(root.dtype) * root)).to(weight.dtype))


def _are_alike(*lists: Sequence[Tensor]) -> bool:
    """Whether they have one dtype."""
    return len({tensor.dtype for tensors in lists for tensor in tensors}) == 1


def take_scratch(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Scratch]:
    """Blocks of these tensors' shapes to compute in, kept for all steps of a thread: to allocate them anew
    takes as long as half a step. With fp32 they take 24 MB at most, or three rows of a layer."""
    shapes = tuple([tensor.shape for tensor in tensors])
    count, kept = 3 * sum(map(math.prod, shapes)), getattr(_scratch, "memory", None)
    if kept is None or kept.dtype != dtype or kept.numel() < count:
        _scratch.memory = kept = torch.empty(count, dtype=dtype, device="cpu")
        _scratch.blocks = {}
    blocks: dict[tuple[torch.Size, ...], list[Scratch]] = _scratch.blocks
    if shapes not in blocks:
        if len(blocks) == MOST_SHAPES:
            blocks.clear()
        blocks[shapes], start = [], 0
        for shape in shapes:
            stop = start + 3 * math.prod(shape)
            block, h, z = kept[start:stop].view(3, *shape).unbind()
            blocks[shapes].append(Scratch(block, block.mT if len(shape) > 1 else block, h, z))
            start = stop
    return blocks[shapes]


def is_plain(rule: Rule) -> bool:
    """Whether a step is the paper's ``w - lr g / gamma``."""
    return rule.method == "sgd" and not rule.momentum and not rule.coupled_decay


def inverse_power(x: Tensor, power: int, p: int, out: Tensor) -> None:
    """``x^(-power/p)`` for powers of 1 or 2 and p = 1, 2, 4."""
    if 4 * power == p:
        x = torch.sqrt(x, out=out)
    torch.rsqrt(x, out=out) if power < p else torch.reciprocal(x, out=out)
    if power > p:
        out.mul_(out)


def _blocks(layer: LayerTensors) -> Iterator[slice | None]:
    """Its rows, so many at a time that they are a block; None for all of them."""
    step = max(BLOCK // max(layer.columns, 1), 1)
    if layer.rows <= step:
        yield None
        return
    for start in range(0, layer.rows, step):
        yield slice(start, min(start + step, layer.rows))


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
