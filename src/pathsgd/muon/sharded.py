"""Blocks of which a rank holds a part (DTensor).

Muon's direction alone needs whole matrices: they are dealt out over the ranks, so that each is put together,
orthogonalised and cut again on one of them. For the rest sums over ranks are enough
(:func:`pathsgd.sharding.reduce_over_ranks`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from pathsgd.muon.blocks import Block

Compute = Callable[[list[Tensor]], list[Tensor]]
"""From tensors to as many of the same shapes."""


def on_whole_blocks(blocks: Sequence[Block], parts: Sequence[Tensor], compute: Compute) -> list[Tensor]:
    """``compute`` of whole blocks, and of each result the part that this rank holds.

    A collective call: twice all-to-all for each group of ranks. A rank sends what it holds, and receives as
    much.

    Args:
        blocks: of a parameter each.
        parts: what this rank holds of them.
        compute: is given all whole blocks that fell to this rank; those that are not sharded fall to all.
    """
    result_of: dict[int, Tensor] = {}
    by_group: dict[tuple[dist.ProcessGroup | None, torch.dtype], list[int]] = {}
    for k, (block, part) in enumerate(zip(blocks, parts, strict=True)):
        key = block.shards[-1].group if block.shards else None, part.dtype
        by_group.setdefault(key, []).append(k)
    for (group, _), places in by_group.items():
        held = [parts[k] for k in places]
        if group is None:
            results = compute(held)
        else:
            results = _Exchange([blocks[k] for k in places], group).run(held, compute)
        result_of.update(zip(places, results, strict=True))
    return [result_of[k] for k in range(len(blocks))]


class _Exchange:
    """Blocks that are sharded over one group of ranks, dealt out over these ranks."""

    def __init__(self, blocks: Sequence[Block], group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.blocks = blocks
        self.dims = [block.shards[-1].dim for block in blocks]
        shapes = [block.matrix_shape for block in blocks]
        # The cost of a matrix's product with its own transpose.
        self.dealt = deal([m * n * min(m, n) for m, n in shapes], self.ranks)
        """The numbers of each rank's blocks."""

    def run(self, parts: Sequence[Tensor], compute: Compute) -> list[Tensor]:
        numbers = self.dealt[self.rank]
        to_owners = [[(k, self.rank) for k in dealt] for dealt in self.dealt]
        from_holders = [[(k, rank) for k in numbers] for rank in range(self.ranks)]
        held = {(k, self.rank): part for k, part in enumerate(parts)}
        received = self._send(parts[0], held, to_owners, from_holders)
        whole = [torch.cat([received[k, r] for r in range(self.ranks)], self.dims[k]) for k in numbers]
        # What is sharded over another group, too, is a part still.
        outer = [replace(self.blocks[k], shards=self.blocks[k].shards[:-1]) for k in numbers]
        results = on_whole_blocks(outer, whole, compute)
        cut = {}
        for k, result in zip(numbers, results, strict=True):
            dim = self.dims[k]
            lengths = [_part_shape(self.blocks[k], r)[dim] for r in range(self.ranks)]
            cut.update({(k, r): part for r, part in enumerate(result.split(lengths, dim))})
        returned = self._send(parts[0], cut, from_holders, to_owners)
        return [returned[k, self.rank] for k in range(len(parts))]

    def _send(
        self,
        like: Tensor,
        parts: Mapping[tuple[int, int], Tensor],
        sent: list[list[tuple[int, int]]],
        received: list[list[tuple[int, int]]],
    ) -> dict[tuple[int, int], Tensor]:
        """Parts by (block, holder): to every rank those in ``sent``, and from it those in ``received``."""
        outgoing = [parts[key].flatten() for keys in sent for key in keys]
        buffer = torch.cat([like.new_empty(0), *outgoing])
        shapes = {(k, r): _part_shape(self.blocks[k], r) for keys in received for k, r in keys}
        arriving = [sum(math.prod(shapes[key]) for key in keys) for keys in received]
        leaving = [sum(parts[key].numel() for key in keys) for keys in sent]
        arrived = buffer.new_empty(sum(arriving))
        dist.all_to_all_single(arrived, buffer, arriving, leaving, group=self.group)
        pieces = arrived.split([math.prod(shape) for shape in shapes.values()])
        return {key: piece.view(shapes[key]) for key, piece in zip(shapes, pieces, strict=True)}


def _part_shape(block: Block, rank: int) -> tuple[int, ...]:
    """The shape of a rank's part of a block, ``rank`` being that among the innermost group."""
    *outer, last = block.shards
    cuts = [(s.dim, (s.start, s.start + s.length)) for s in outer] + [(last.dim, last.bounds(rank))]
    shape = list(block.shape)
    for dim, (low, high) in cuts:
        shape[dim] = high - low
    start, stop = block.rows_in(bounds for dim, bounds in cuts if dim == block.axis)
    shape[block.axis] = stop - start
    return tuple(shape)


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of what each rank computes: the next most expensive goes to the one with least to do."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        load, rank = loads[0]
        dealt[rank].append(k)
        heapq.heapreplace(loads, (load + costs[k], rank))
    return dealt
