"""The spectral norms of steps of which a rank holds a part (DTensor): the iteration of
:mod:`pathsgd.optim.relative.spectral`, whose vectors are whole on every rank.

A rank multiplies its part by what it meets of a vector, and the products of all ranks are added up. All
blocks take an iteration together: two all-reduces, as long as all blocks have rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.relative.spectral import iterate_all


def find_norms_over_ranks(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    counts: Sequence[int],
    blocks: Sequence[Block],
    parts: Sequence[Tensor],
) -> Tensor:
    """The spectral norm of every whole step, or somewhat less. A collective call.

    Args:
        optimizer: in whose state the vectors are kept.
        parameters: in the order of the blocks.
        counts: how many blocks each has.
        blocks: of these parameters.
        parts: what this rank holds of their steps, as matrices.
    """
    left = iter(blocks)
    widths = [[math.prod(_shape(next(left))[1:]) for _ in range(count)] for count in counts]

    def multiply(places: Sequence[int], vectors: Sequence[Tensor], transposed: bool) -> list[Tensor]:
        return _multiply([blocks[k] for k in places], [parts[k] for k in places], vectors, transposed)

    return iterate_all(optimizer, parameters, widths, parts[0], multiply)


def _multiply(
    blocks: Sequence[Block], parts: Sequence[Tensor], vectors: Sequence[Tensor], transposed: bool
) -> list[Tensor]:
    """The products of whole blocks, or of their transposes, with whole vectors."""
    found: list[Tensor] = []
    for block, part, x in zip(blocks, parts, vectors, strict=True):
        rows, *columns = _shape(block)
        ends = [(rows,), tuple(columns)]
        held = [_held(block, dim) for dim in range(len(block.shape))]
        cuts = [held[:1], held[1:]]
        if transposed:
            part, ends, cuts = part.mT, ends[::-1], cuts[::-1]
        y = x.new_zeros(math.prod(ends[0]))
        product = part @ _cut(x.view(ends[1]), cuts[1]).flatten()
        own = _cut(y.view(ends[0]), cuts[0])
        own.copy_(product.view(own.shape))
        found.append(y)
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for k, block in enumerate(blocks):
        for shard in block.shards:
            by_group.setdefault(shard.group, []).append(k)
    for group, places in by_group.items():
        total = torch.cat([found[k] for k in places])
        dist.all_reduce(total, group=group)
        for k, y in zip(places, total.split([len(found[k]) for k in places]), strict=True):
            found[k] = y
    return found


def _shape(block: Block) -> list[int]:
    shape = list(block.shape)
    shape[block.axis] = block.length
    return shape


def _held(block: Block, dim: int) -> tuple[int, int]:
    """Which part of a block along one of its axes this rank holds, as (start, length)."""
    low, high = 0, block.shape[dim]
    for shard in block.shards:
        if shard.dim == dim:
            low += shard.start
            high = low + shard.length
    first, last = (block.start, block.start + block.length) if dim == block.axis else (0, block.shape[dim])
    start = min(max(low, first), last)
    return start - first, max(0, min(high, last) - start)


def _cut(tensor: Tensor, cuts: Sequence[tuple[int, int]]) -> Tensor:
    for dim, (start, length) in enumerate(cuts):
        tensor = tensor.narrow(dim, start, length)
    return tensor
