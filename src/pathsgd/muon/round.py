"""One round of balancing, in the precision of the weights: what leads into each unit and what leads out of it
get closer in norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pathsgd._torch import is_capturing
from pathsgd.balancing.balance import find_exact
from pathsgd.balancing.class_edges import cut_edges
from pathsgd.graph.unit_classes import EdgeClasses
from pathsgd.graph.unit_relations import Relations, Terms
from pathsgd.sharding import local_part, shards_of

EVERY = 10
"""Steps between rounds."""
MAX_FACTOR = 2.0
"""The most that one round rescales a unit by."""
POWERS = {"momentum_buffer": -1, "exp_avg": -1, "exp_avg_sq": -2}
"""With which power of a weight's factor its state is multiplied."""


class Round:
    """One round towards the balance, in ordinary precision."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        edges: Mapping[str, EdgeClasses],
        relations: Relations,
        held: Tensor,
    ) -> None:
        self.parameters = parameters
        device = local_part(next(iter(parameters.values()))).device
        cut = {name: cut_edges(edge, shards_of(parameters[name])) for name, edge in edges.items()}
        self.edges = EdgeTable(cut, device)
        self.dims = [
            [[d for d in range(p.dim()) if ids.shape[d] == 1] for ids in (edges[n].head, edges[n].tail)]
            for n, p in parameters.items()
        ]
        ends = [ids for edge in edges.values() for ids in (edge.head, edge.tail)]
        classes = torch.cat([ids.flatten() for ids in ends])
        leads_in = torch.cat([torch.full((ids.numel(),), not k % 2) for k, ids in enumerate(ends)])
        self.grows, self.shrinks = (
            places.to(device) for places in list_places(relations, classes, leads_in, held)
        )
        self.exact = find_exact(parameters, edges, relations).to(device)
        self.relations, self.free = relations.to(device), (~held & relations.is_free).to(device)
        self.sizes = [ids.numel() for ids in ends]
        self._find_held_parts(cut, edges)

    def _find_held_parts(self, cut: Mapping[str, EdgeClasses], edges: Mapping[str, EdgeClasses]) -> None:
        """Finds where the sums of this rank go that are of sharded parameters, and over which ranks they are
        added up."""
        self.held_parts: list[Tensor | None] = []
        self.groups: dict[dist.ProcessGroup, Tensor] = {}
        by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
        start = 0
        for name, p in self.parameters.items():
            shards = shards_of(p)
            for ids in (edges[name].head, edges[name].tail):
                numbers = EdgeClasses(torch.arange(ids.numel()).reshape(ids.shape), ids)
                self.held_parts.append(cut_edges(numbers, shards).head.flatten() if shards else None)
                for shard in shards:
                    by_group.setdefault(shard.group, []).append(start + torch.arange(ids.numel()))
                start += ids.numel()
        device = self.free.device
        self.groups = {group: torch.cat(places).to(device) for group, places in by_group.items()}

    def run(self, state: MutableMapping[Tensor, Any], steps: int) -> None:
        """Does a round after every ``EVERY`` steps; in a CUDA graph, which cannot count, after each."""
        if steps % EVERY and not is_capturing():
            return
        weights = [local_part(p).detach() for p in self.parameters.values()]
        sums = []
        for w, dims in zip(weights, self.dims, strict=True):
            dtype = torch.promote_types(w.dtype, torch.float32)
            for own in dims:
                norm = torch.linalg.vector_norm(w, dim=own, dtype=dtype) if own else w.to(dtype).abs()
                sums.append(norm.square().flatten())
        total = self._complete(sums)
        total = torch.cat([total, total.new_zeros(1)])
        grows, shrinks = total[self.grows].sum(1), total[self.shrinks].sum(1)
        factor = find_factors(grows, shrinks, self.free, self.relations, self.exact)
        looked_up = self.edges.look_up(factor, factor)
        for (name, p), w in zip(self.parameters.items(), weights, strict=True):
            head, tail = looked_up[name]
            w.mul_(head.to(w.dtype)).div_(tail.to(w.dtype))
            for key, power in POWERS.items():
                if key in state.get(p, ()):
                    kept = local_part(state[p][key])
                    for _ in range(-power):
                        kept.div_(head.to(kept.dtype)).mul_(tail.to(kept.dtype))

    def _complete(self, sums: list[Tensor]) -> Tensor:
        """All sums in one vector, added up over ranks."""
        if not self.groups:
            return torch.cat(sums)
        parts = []
        for own, held, size in zip(sums, self.held_parts, self.sizes, strict=True):
            whole = own if held is None else own.new_zeros(size).index_copy(0, held.to(own.device), own)
            parts.append(whole)
        total = torch.cat(parts)
        for group, places in self.groups.items():
            part = total[places]
            dist.all_reduce(part, group=group)
            total[places] = part
        return total


class EdgeTable:
    """The classes at both ends of these parameters' entries, on one device."""

    def __init__(self, edges: Mapping[str, EdgeClasses], device: torch.device) -> None:
        self.names = list(edges)
        self._heads = _Gather([edge.head for edge in edges.values()], device)
        self._tails = _Gather([edge.tail for edge in edges.values()], device)

    def look_up(self, at_heads: Tensor, at_tails: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns, by parameter, the factors that multiply its entries and those that divide them, from the
        values of classes; of shapes that expand to its own."""
        heads, tails = self._heads.run(at_heads), self._tails.run(at_tails)
        return dict(zip(self.names, zip(heads, tails, strict=True), strict=True))


class _Gather:
    """Values by number, for several tensors of numbers in one call of torch."""

    def __init__(self, indices: list[Tensor], device: torch.device) -> None:
        self.shapes = [index.shape for index in indices]
        self.sizes = [index.numel() for index in indices]
        self.index = torch.cat([torch.empty(0, dtype=torch.int64), *(index.flatten() for index in indices)])
        self.index = self.index.to(device)

    def run(self, values: Tensor) -> list[Tensor]:
        pieces = values[self.index].split(self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def find_factors(grows: Tensor, shrinks: Tensor, free: Tensor, relations: Relations, exact: Tensor) -> Tensor:
    """The factor of each class that brings the sums of squares of weights on both sides of free ones closer.

    Args:
        grows: of weights that grow with the factor of a class.
        shrinks: of weights that shrink with it.
        free: whether it may be rescaled.
        relations: of the classes, on their device.
        exact: whether it is to be a power of two.
    """
    live = free & (grows > 0) & (shrinks > 0) & torch.isfinite(grows) & torch.isfinite(shrinks)
    ratio = torch.where(live, shrinks, 1) / torch.where(live, grows, 1)
    most = math.log2(MAX_FACTOR)
    log = (ratio.log2() / (4 * (1 + relations.rate))).clamp(-most, most)
    return relations.complete(torch.where(exact, log.round(), log)).exp2()


def list_places(
    relations: Relations, classes: Tensor, leads_in: Tensor, held: Tensor
) -> tuple[Tensor, Tensor]:
    """The places of each free class and of what follows from it in a list: those of weights that grow with
    its factor, and of weights that shrink. A place is there as often as the power is high.

    Args:
        relations: of the classes.
        classes: by place.
        leads_in: by place, whether weights lead into the class, so that they grow with its factor.
        held: by class, whether it is not rescaled.

    Returns:
        Two tables with a row for each class, filled up with one past the last place: sums over rows of one
        length add up in the same order every time.
    """
    places = Terms(torch.arange(len(classes)), classes, torch.where(leads_in, 1, -1)).expand(relations.terms)
    places = places.select(~held[places.by])
    grows, shrinks = (
        _fill_rows(
            places.by.repeat_interleave(powers), places.of.repeat_interleave(powers), len(held), len(classes)
        )
        for powers in (places.power.clamp(min=0), (-places.power).clamp(min=0))
    )
    return grows, shrinks


def _fill_rows(rows: Tensor, values: Tensor, count: int, filler: int) -> Tensor:
    order = rows.argsort(stable=True)
    rows, values = rows[order], values[order]
    position = torch.arange(len(rows)) - torch.searchsorted(rows, torch.arange(count))[rows]
    table = torch.full((count, int(position.max()) + 1 if len(rows) else 1), filler)
    table[rows, position] = values
    return table
