"""The update on a CPU in torch operations: a small chain at once, a large one in blocks of rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
Strides = tuple[tuple[int, ...], ...]
MOST_SHAPES = 64
"""Lists of shapes whose blocks are kept."""


class Blocked:
    """See :class:`pathsgd.optim.fused.implementation.Implementation`."""

    def __init__(self, p: int, dtype: torch.dtype) -> None:
        self.p, self.dtype = p, dtype
        _, self._low, self._high = safe_range(dtype)

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor], frame: ExponentFrame) -> None:
        self.frame, self._lengths = frame, [len(vector) for vector in (*into, *out)]
        # All vectors as one, with views that are made once: each call of torch costs as much as the work on a
        # few thousand numbers.
        self._sums = torch.cat([*into, *out])
        views = self._sums.split(self._lengths)
        self.next_into, self.next_out = views[: len(into)], views[len(into) :]
        # No step changes gamma_in of what a chain reads and gamma_out of what it returns.
        self._begins_at_one, self._ends_at_one = bool((into[0] == 1).all()), bool((out[-1] == 1).all())
        self._sums_squares = self._begins_at_one and self.p == 2
        count = len(into)
        self._into_factors = [frame.into_factor(k) for k in range(count - 1)]
        self._bias_factors = [frame.bias_factor(k) for k in range(count - 1)]
        self._out_factors = [1.0, *(frame.out_factor(k) for k in range(1, count))]
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
        if plain not in self._current:
            if plain not in self._roots:
                ends = self._begins_at_one, self._ends_at_one
                self._roots[plain] = Roots(self._lengths, self.frame, self.dtype, 2 if plain else 1, ends)
            self._roots[plain].fill(self._sums, self.p, self._dead)
            self._current.add(plain)
        return self._roots[plain]

    def run(self, layers: Sequence[LayerTensors], launch: Launch) -> None:
        if sum([layer.weight.numel() for layer in layers]) > BLOCK:
            launch(layers)
            return
        tensors = [t for layer in layers for t in (layer.weight, layer.bias) if t is not None]
        scratch = take_scratch(tensors, self.dtype)
        for rule in {id(rule): rule for own in layers for rule in (own.rule, own.bias_rule)}.values():
            self._move_together(rule, layers, scratch)
        self._sum_together(layers, [own for own in scratch if own.block.dim() > 1])
        self.finish()

    def _move_together(self, rule: Rule, layers: Sequence[LayerTensors], scratch: Sequence[Scratch]) -> None:
        """Moves all tensors of one rule by the calls of torch that one of them would take."""
        roots, own, parts = self.roots(rule), iter(scratch), []
        for k, layer in enumerate(layers):
            block = next(own)
            if layer.rule is rule:
                root = roots.of_weight(k, block.block)
                parts.append(Part(layer.weight, layer.weight_grad, layer.weight_state, root, block))
            if layer.bias is not None:
                block = next(own)
                if layer.bias_rule is rule and layer.bias_grad is not None:
                    parts.append(Part(layer.bias, layer.bias_grad, layer.bias_state, roots.bias[k], block))
        update_(parts, rule, self._dead is None)

    def _sum_together(self, layers: Sequence[LayerTensors], scratch: Sequence[Scratch]) -> None:
        """Both sums of all layers, whose powers are held at the same time."""
        last = len(layers) - 1
        for k, (layer, own) in enumerate(zip(layers, scratch, strict=True)):
            self._raise_to_p(k, layer.weight, own)
            if k < last:
                self._sum_into(k, layer.weight, self.next_into[k + 1], own)
                self._close_into(k, layer.bias)
        for k in range(last, 0, -1):
            torch.mv(scratch[k].transposed, self.next_out[k], out=self.next_out[k - 1])
            self._close_out(k)

    def update(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._pass(k, layer, into, out, move=True)

    def sum_powers(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        self._pass(k, layer, into, out, move=False)

    def _pass(self, k: int, layer: LayerTensors, into: bool, out: bool, move: bool) -> None:
        all_live = self._dead is None
        if move and layer.bias is not None and layer.bias_grad is not None:
            root = self.roots(layer.bias_rule).bias[k]
            (scratch,) = take_scratch([layer.bias], self.dtype)
            part = Part(layer.bias, layer.bias_grad, layer.bias_state, root, scratch)
            update_([part], layer.bias_rule, all_live)
        step = max(BLOCK // max(layer.columns, 1), 1)
        for start in range(0, layer.rows, step):
            rows = slice(start, start + step)
            weight = layer.weight[rows]
            (scratch,) = take_scratch([weight], self.dtype)
            if move:
                root = self.roots(layer.rule).of_weight(k, scratch.block, rows)
                state = tuple(s[rows] for s in layer.weight_state)
                update_([Part(weight, layer.weight_grad[rows], state, root, scratch)], layer.rule, all_live)
            if into or out:
                self._raise_to_p(k, weight, scratch)
            if into:
                self._sum_into(k, weight, self.next_into[k + 1][rows], scratch)
            if out and start == 0:
                torch.mv(scratch.transposed, self.next_out[k][rows], out=self.next_out[k - 1])
            elif out:
                self.next_out[k - 1].addmv_(scratch.transposed, self.next_out[k][rows])
        if into:
            self._close_into(k, layer.bias)
        if out:
            self._close_out(k)

    def _raise_to_p(self, k: int, weight: Tensor, scratch: Scratch) -> None:
        """Of the stored weights, which low precision has rounded."""
        if k > 0 or not self._sums_squares:
            _power_into(scratch.block, weight, self.p)

    def _sum_into(self, k: int, weight: Tensor, total: Tensor, scratch: Scratch) -> None:
        if k == 0 and self._sums_squares:  # torch does it in one pass
            torch.linalg.vector_norm(weight, dim=1, dtype=self.dtype, out=total).square_()
        else:
            torch.mv(scratch.block, self.next_into[k], out=total)

    def _close_into(self, k: int, bias: Tensor | None) -> None:
        total = _multiply(self.next_into[k + 1], self._into_factors[k])
        if bias is not None:
            bias = bias if bias.dtype == self.dtype else bias.to(self.dtype)
            _add_power(total, _times(bias, self._bias_factors[k]), self.p)

    def _close_out(self, k: int) -> None:
        _multiply(self.next_out[k - 1], self._out_factors[k])

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
        lowest, highest = sums.aminmax()
        least, most = lowest.item(), highest.item()
        if least > 0:
            return self._low <= least and most <= self._high
        self._dead = ~(sums > 0)
        if not first and bool((self._dead if before is None else self._dead & ~before).any()):
            return False
        return bool(torch.where(self._dead, 1.0, sums).min() >= self._low) and most <= self._high


class Roots:
    """The inverse roots of all vectors, or their squares: one number for each input and output of a layer."""

    def __init__(
        self,
        lengths: Sequence[int],
        frame: ExponentFrame,
        dtype: torch.dtype,
        power: int,
        ends_are_one: tuple[bool, bool],
    ) -> None:
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
        begins_at_one, ends_at_one = ends_are_one
        self._by_rows = 0 if begins_at_one else -1
        """The layer with one number for a row, those of its columns being 1."""
        self._by_columns = count - 1 if ends_at_one and self.factors[-1] == 1 else -1
        self._framed = any(f != 1 for f in (*self.factors, *self._bias_factors))

    def of_weight(self, k: int, block: Tensor, rows: slice | None = None) -> Tensor:
        """Of these rows of layer k, made in ``block`` if need be."""
        if k == self._by_columns:
            return self.into[k]
        out = self.out[k] if rows is None else self.out[k][rows]
        return out if k == self._by_rows else torch.mul(out, self.into[k], out=block)

    def fill(self, sums: Tensor, p: int, dead: Tensor | None) -> None:
        """From the sums, of which those that are not positive are ``dead``."""
        inverse_power(sums, self.power, p, out=self._whole)
        if dead is not None:
            self._whole.masked_fill_(dead, 0)
        if not self._framed:
            return
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
    rule it may be ``1 / gamma``, which saves a pass."""
    scratch: Scratch


def update_(parts: Sequence[Part], rule: Rule, all_live: bool = False, by_h: bool = False) -> None:
    """One step of these tensors and their state, in place; ``all_live`` says that no gamma is 0. ``by_h``
    computes h first, as the reference does: rescaled copies of which one needs exponents, and is left to the
    reference, take the same steps of SGD to the last bit."""
    weights, grads = [part.weight for part in parts], [part.grad for part in parts]
    roots = [part.root for part in parts]
    lr, decay = float(rule.lr), rule.decoupled_decay
    if decay and rule.decay == "live" and not all_live:
        for weight, root in zip(weights, roots, strict=True):
            weight.mul_(1 - (root > 0).to(root.dtype) * (rule.lr * decay))
    elif decay:
        _multiply_all(weights, 1 - lr * decay)
    if is_plain(rule) and not by_h:
        _move(weights, grads, roots, lr if rule.maximize else -lr)
        return
    states = [[*own] for own in zip(*(part.state for part in parts), strict=True)]
    momentum_alone = rule.method == "sgd" and not rule.nesterov and not rule.coupled_decay
    if momentum_alone and not by_h and _are_alike(*states, grads, roots):
        # apply_momentum in two passes: h is not stored.
        _multiply_all(states[0], rule.momentum)
        _torch.foreach("addcmul_", states[0], grads, roots, value=-1.0 if rule.maximize else 1.0)
        _move(weights, states[0], roots, -lr)
        return
    hs = [torch.mul(grad, root, out=scratch.h) for _, grad, _, root, scratch in parts]
    if rule.maximize:
        _torch.foreach("neg_", hs)
    if rule.coupled_decay:
        for h, weight, root in zip(hs, weights, roots, strict=True):
            h.add_(torch.where(root > 0, weight / root, 0), alpha=rule.coupled_decay)
    if rule.method == "sgd":
        buffers = states[0] if states else []
        us, _ = apply_momentum(hs, buffers, rule.momentum, rule.nesterov, _overwrite)
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


def _multiply_all(tensors: list[Tensor], factor: float) -> None:
    # A number would be made a tensor for each of them, which takes longer than to multiply a small one.
    _torch.foreach("mul_", tensors, torch.full((), factor, dtype=torch.float64, device="cpu"))


def _are_alike(*lists: Sequence[Tensor]) -> bool:
    """Whether they have one dtype."""
    return len({tensor.dtype for tensors in lists for tensor in tensors}) == 1


def take_scratch(tensors: Sequence[Tensor], dtype: torch.dtype, strided: bool = False) -> list[Scratch]:
    """Blocks of these tensors' shapes to compute in, kept for all steps of a thread: to allocate them anew
    takes as long as half a step. With fp32 they take 24 MB at most, or three rows of a layer. They are
    contiguous, or ``strided`` as the tensors are, which are dense."""
    shapes = tuple([tensor.shape for tensor in tensors])
    strides = tuple([tensor.stride() for tensor in tensors]) if strided else None
    found = _kept.blocks.get((shapes, strides, dtype))
    return _make_scratch(shapes, strides, dtype) if found is None else found


@torch.inference_mode(False)  # where tensors are made that only this mode may write
def _make_scratch(
    shapes: tuple[torch.Size, ...], strides: Strides | None, dtype: torch.dtype
) -> list[Scratch]:
    counts = [3 * shape.numel() for shape in shapes]
    if _kept.memory.dtype != dtype or _kept.memory.numel() < sum(counts):
        _kept.memory = torch.empty(sum(counts), dtype=dtype, device="cpu")
        _kept.blocks.clear()
    if len(_kept.blocks) == MOST_SHAPES:
        _kept.blocks.clear()
    found = _kept.blocks[shapes, strides, dtype] = []
    for k, own in enumerate(_kept.memory[: sum(counts)].split(counts)):
        shape = shapes[k]
        block, h, z = own.view(3, *shape).unbind()
        if strides is not None:
            block, h, z = (x.as_strided(shape, strides[k], x.storage_offset()) for x in (block, h, z))
        found.append(Scratch(block, block.mT if len(shape) > 1 else block, h, z))
    return found


class _Kept(threading.local):
    """By a thread."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, device="cpu")
        self.blocks: dict[tuple[tuple[torch.Size, ...], Strides | None, torch.dtype], list[Scratch]] = {}


_kept = _Kept()


def is_plain(rule: Rule) -> bool:
    """Whether a step is the paper's ``w - lr g / gamma``."""
    return rule.method == "sgd" and not rule.momentum and not rule.coupled_decay


def inverse_power(x: Tensor, power: int, p: int, out: Tensor) -> None:
    """``x^(-power/p)`` for powers of 1 or 2 and p = 1, 2, 4; to the bits of the reference, as rsqrt is
    not."""
    for _ in range((p // power).bit_length() - 1):
        x = torch.sqrt(x, out=out)
    torch.reciprocal(x, out=out)
    if power > p:
        out.mul_(out)


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
