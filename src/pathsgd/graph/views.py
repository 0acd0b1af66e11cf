"""Views of plain tensors: activations, weights, or tensors of unit numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pathsgd.graph.nodes import Embed, Expand, Operation, Permute, Reshape, Shape, Slice, View


def view_tensor(operation: Operation, x: Tensor) -> Tensor:
    """``x`` seen through one view (or embedded in zeros, the adjoint of a slice)."""
    match operation:
        case Reshape(shape):
            return x.reshape(shape)
        case Permute(dims):
            return x.permute(dims)
        case Expand(shape):
            return x.expand(shape)
        case Slice(dim, start, length, step):
            if step == 1:
                return x.narrow(dim, start, length)
            return x.index_select(dim, places(start, length, step, x))
        case Embed(dim, start, size, step):
            return embed(x, dim, start, size, step, 0)
        case _:
            raise AssertionError(f"{operation} is no view")


def view_shape(view: Operation, shape: Shape) -> Shape:
    """The shape of a view of a tensor."""
    return tuple(view_tensor(view, torch.empty(shape, device="meta")).shape)


def reshaped_axes(before: Shape, after: Shape) -> Iterator[tuple[range, range]]:
    """The smallest groups of neighbouring axes that a reshape turns into each other."""
    if 0 in before:
        yield range(len(before)), range(len(after))
        return
    i = j = 0
    while i < len(before) or j < len(after):
        first, other = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (n := math.prod(before[first:i])) != (m := math.prod(after[other:j])):
            i, j = (i + 1, j) if n < m else (i, j + 1)
        yield range(first, i), range(other, j)


def compress(x: Tensor) -> Tensor:
    """A tensor with size one along every axis on which they do not change."""
    for dim in range(x.dim()):
        first = x.narrow(dim, 0, 1) if x.shape[dim] else x
        if x.shape[dim] > 1 and bool((x == first).all()):
            x = first
    return x


def reshape_compressed(x: Tensor, before: Shape, after: Shape) -> Tensor:
    """``x``, which stands for a tensor of shape ``before``, reshaped to ``after``. Axes on which it does not
    change are not written out, so that the length of a sequence costs nothing."""
    written, target = list(x.shape), [1] * len(after)
    for own, others in reshaped_axes(before, after):
        if any(x.shape[d] != 1 for d in own):
            for d in own:
                written[d] = before[d]
            for d in others:
                target[d] = after[d]
    return compress(x.expand(written).reshape(target))


def undo_view(
    view: View,
    x: Tensor,
    before: Shape,
    after: Shape,
    join: Callable[[Tensor, list[int]], Tensor],
    fill: int,
) -> Tensor:
    """``x``, which stands for a view, as it stands for what is seen. ``join`` makes one of what is seen
    several times, along these axes; ``fill`` stands where nothing is."""
    match view:
        case Reshape():
            return reshape_compressed(x, after, before)
        case Permute(dims):
            return x.permute([dims.index(d) for d in range(len(dims))])
        case Expand():
            return join(x, [d for d, n in enumerate(before) if n == 1])
        case Slice(dim, start, length, step):
            wide = x.expand([length if d == dim else n for d, n in enumerate(x.shape)])
            return compress(embed(wide, dim, start, before[dim], step, fill))
        case Embed():
            raise AssertionError("an adjoint in a traced graph")


def places(start: int, length: int, step: int, x: Tensor) -> Tensor:
    """The entries a slice takes, as indices."""
    return torch.arange(start, start + length * step, step, device=x.device)


def embed(x: Tensor, dim: int, start: int, size: int, step: int, fill: float) -> Tensor:
    """``x`` put into an axis of ``size`` entries that are ``fill`` elsewhere."""
    if step == 1:
        after = size - start - x.shape[dim]
        return torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [start, after], value=fill)
    shape = list(x.shape)
    shape[dim] = size
    whole = x.new_full(shape, fill)
    return whole.index_copy(dim, places(start, x.shape[dim], step, x), x)
