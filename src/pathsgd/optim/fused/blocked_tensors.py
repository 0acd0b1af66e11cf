"""Steps on a CPU of any parameters whose gammas are measured: in blocks of rows, without copies of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pathsgd.geometry.gamma import Gamma
from pathsgd.optim.fused.blocked import BLOCK, Part, inverse_power, take_scratch, update_
from pathsgd.optim.rule import Rule, State


class Moved(NamedTuple):
    """A parameter with what moves it."""

    parameter: Tensor
    rule: Rule
    state: State
    gamma: Gamma

    def fits(self) -> bool:
        """Whether its rows can be moved in blocks. torch's fused kernels, of AdaGrad and Adam, take for
        granted that state lies in memory as what is computed in, which lies as the weight does."""
        weight, grad = self.parameter, self.parameter.grad
        return (
            grad is not None
            and grad.layout is torch.strided
            and weight.dim() > 0
            and all(
                t.dtype is self.gamma.dtype and t.device.type == "cpu" for t in (weight, grad, *self.state)
            )
            and (self.rule.method == "sgd" or all(s.stride() == weight.stride() for s in self.state))
            and _is_dense(weight)
            and (_is_by_rows(weight) or weight.numel() <= BLOCK)
        )

    def is_like(self, other: Moved) -> bool:
        """Whether both can be moved at once."""
        return self.rule is other.rule and self.parameter.dtype == other.parameter.dtype


class BlockedTensors:
    """Moves these parameters, which fit."""

    def __init__(self, moved: Sequence[Moved]) -> None:
        self.moved = moved

    @property
    def parameters(self) -> list[Tensor]:
        return [own.parameter for own in self.moved]

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        for batch in self._batches():
            weights = [own.parameter[rows] for own, rows in batch]
            scratch = take_scratch(weights, weights[0].dtype, strided=True)
            rule, all_live, parts = batch[0][0].rule, True, []
            for (own, rows), weight, room in zip(batch, weights, scratch, strict=True):
                assert own.parameter.grad is not None
                root, live = _find_root(own, rows, room.block)
                all_live = all_live and live
                state = tuple([s[rows] for s in own.state])
                parts.append(Part(weight, own.parameter.grad[rows], state, root, room))
            update_(parts, rule, all_live, by_h=True)

    def _batches(self) -> Iterator[list[tuple[Moved, slice]]]:
        """Parameters that can be moved at once, or rows of them, as many as fit into a block."""
        batch: list[tuple[Moved, slice]] = []
        room = 0
        for own in self.moved:
            weight = own.parameter
            count, columns = len(weight), weight[:1].numel()
            each = max(BLOCK // max(columns, 1), 1)
            for start in range(0, count, each):
                size = min(each, count - start) * columns
                if batch and (size > room or not own.is_like(batch[0][0])):
                    yield batch
                    batch = []
                room = (room if batch else BLOCK) - size
                batch.append((own, slice(start, start + each)))
        if batch:
            yield batch


def _find_root(own: Moved, rows: slice, block: Tensor) -> tuple[Tensor, bool]:
    """What a step of these rows multiplies by, made in ``block``, and whether no gamma is 0."""
    p = int(own.rule.p)
    if own.gamma.whole is not None:
        return block, _invert(own.gamma.whole.mantissa.expand(own.parameter.shape)[rows], p, block)
    out, into = (factor.mantissa for factor in own.gamma.factors())
    out = out.expand(len(own.parameter), 1)[rows]
    inverse_out, inverse_into = torch.empty_like(out), torch.empty_like(into)
    live = all([_invert(out, p, inverse_out), _invert(into, p, inverse_into)])
    torch.mul(inverse_out, inverse_into, out=block)
    return block, live


def _invert(sums: Tensor, p: int, into: Tensor) -> bool:
    """Writes ``sums^(-1/p)``, 0 for 0; whether there is no 0."""
    inverse_power(sums, 1, p, out=into)
    live = not sums.numel() or bool(sums.amin() > 0)
    if not live:
        into.nan_to_num_(nan=math.nan, posinf=0.0)
    return live


def _is_dense(tensor: Tensor) -> bool:
    """Whether it lies in memory without gaps and overlaps, in any order of its axes."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _is_by_rows(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and tensor.stride(0) == max(tensor.stride())
