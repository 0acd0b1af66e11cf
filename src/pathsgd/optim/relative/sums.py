"""Norms of blocks and ``<g, u>``: sums over entries in fp64, so that no square is lost.

Every rank sums over the entries it holds, and one all-reduce adds up those of all blocks, a few numbers for
each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pathsgd._torch import foreach
from pathsgd.geometry.sharded import reduce_over_ranks
from pathsgd.optim.relative.blocks import Block

LARGE = 1 << 15
"""A CPU sums more entries than these row by row: in fp64 it takes ten times as long as in fp32, and all of
them as one sum in fp32 would lose four digits."""

LEAST = 2.0**-40
"""Of norms of at least this size fp32 loses no square that counts."""


def find_norms(blocks: Sequence[Block], tensors: Sequence[Tensor]) -> Tensor:
    """The l_2 norms of whole blocks from what this rank holds of them. A collective call."""
    norms = _norms(tensors)
    if not any(block.shards for block in blocks):
        return norms
    return reduce_over_ranks(norms.square(), [block.shards for block in blocks]).sqrt()


def measure_turn(
    blocks: Sequence[Block], grads: Sequence[Tensor], u: Sequence[Tensor], steps: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """``<g, u>`` of every block, and the norms of u before and after it is moved by these steps, in place. A
    collective call."""
    along = torch.stack([_sum_rows(product).sum(dtype=torch.float64) for product in foreach("mul", grads, u)])
    before = _norms(u)
    foreach("add_", u, steps)
    norms = before, _norms(u)
    if not any(block.shards for block in blocks):
        return along, *norms
    sums = torch.stack([along, *(norm.square() for norm in norms)])
    along, *squares = reduce_over_ranks(sums, [block.shards for block in blocks])
    return along, *(square.sqrt() for square in squares)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    large = [k for k, tensor in enumerate(tensors) if _is_large(tensor)]
    by_rows = list(tensors)
    for k in large:
        by_rows[k] = torch.linalg.vector_norm(tensors[k], dim=_inside_rows(tensors[k]))
    found = list(foreach("norm", by_rows, 2, dtype=torch.float64))
    if large and not _are_in_range(torch.stack([found[k] for k in large])):
        for k in large:
            if not _are_in_range(found[k]):
                found[k] = torch.linalg.vector_norm(tensors[k], dtype=torch.float64)
    return torch.stack(found)


def _are_in_range(norms: Tensor) -> bool:
    return bool(((norms >= LEAST) & (norms < torch.inf)).all())


def _sum_rows(tensor: Tensor) -> Tensor:
    return tensor.sum(_inside_rows(tensor)) if _is_large(tensor) else tensor


def _is_large(tensor: Tensor) -> bool:
    return (
        tensor.numel() > LARGE
        and tensor.dim() > 1
        and tensor.device.type == "cpu"
        and tensor.dtype is torch.float32
        and tensor.numel() // tensor.shape[_rows_of(tensor)] <= LARGE
    )


def _rows_of(tensor: Tensor) -> int:
    """The axis along which neighbours are farthest apart in memory."""
    strides = tensor.stride()
    return strides.index(max(strides))


def _inside_rows(tensor: Tensor) -> list[int]:
    rows = _rows_of(tensor)
    return [d for d in range(tensor.dim()) if d != rows]
