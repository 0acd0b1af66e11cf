"""One round of balancing, in the precision of the weights: what leads into each unit and what leads out of it
get closer in norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pathsgd.geometry.class_edges import cut_edges
from pathsgd.geometry.sharded import local_part, shards_of
from pathsgd.graph.unit_classes import EdgeClasses
from pathsgd.optim.relative.edges import EdgeTable

MOST = 2.0
"""The most that one round rescales a unit by."""
POWERS = {"momentum_buffer": -1, "exp_avg": -1, "exp_avg_sq": -2}
"""With which power of a weight's factor its state is multiplied."""


class Round:
    """One round towards the balance, in ordinary precision."""

    def __init__(
        self, parameters: Mapping[str, Tensor], edges: Mapping[str, EdgeClasses], held: Tensor
    ) -> None:
        self.parameters = parameters
        device = local_part(next(iter(parameters.values()))).device
        cut = {name: cut_edges(edge, shards_of(parameters[name])) for name, edge in edges.items()}
        self.edges = EdgeTable(cut, device)
        self.dims = [
            [[d for d in range(p.dim()) if ids.shape[d] == 1] for ids in (edges[n].head, edges[n].tail)]
            for n, p in parameters.items()
        ]
        self.exact = torch.zeros(len(held), dtype=torch.bool)
        degree = torch.ones(len(held))
        ends = [
            (ids, edge.degree, k) for edge in edges.values() for k, ids in enumerate((edge.head, edge.tail))
        ]
        for edge, p in zip(edges.values(), parameters.values(), strict=True):
            degree[edge.tail.flatten()] = degree[edge.tail.flatten()].clamp(min=edge.degree)
            if p.element_size() < 4:
                self.exact[edge.head.flatten()] = self.exact[edge.tail.flatten()] = True
        self.into, self.out = (_list_places(ends, len(held), side, held).to(device) for side in (0, 1))
        self.degrees = torch.cat(
            [torch.full((ids.numel(),), float(degree if side else 1)) for ids, degree, side in ends]
        ).to(device)
        self.exact, self.degree, self.free = self.exact.to(device), degree.to(device), (~held).to(device)
        self.sizes = [ids.numel() for ids, _, _ in ends]
        self._find_held_parts(cut, edges)

    def _find_held_parts(self, cut: Mapping[str, EdgeClasses], edges: Mapping[str, EdgeClasses]) -> None:
        """Of sharded parameters: where the sums of this rank go, and over which ranks they are added up."""
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
        device = self.degrees.device
        self.groups = {group: torch.cat(places).to(device) for group, places in by_group.items()}

    def run(self, state: MutableMapping[Tensor, Any]) -> None:
        weights = [local_part(p).detach() for p in self.parameters.values()]
        sums = []
        for w, dims in zip(weights, self.dims, strict=True):
            dtype = torch.promote_types(w.dtype, torch.float32)
            for own in dims:
                norm = torch.linalg.vector_norm(w, dim=own, dtype=dtype) if own else w.to(dtype).abs()
                sums.append(norm.square().flatten())
        total = self._complete(sums) * self.degrees
        total = torch.cat([total, total.new_zeros(1)])
        arriving, leaving = total[self.into].sum(1), total[self.out].sum(1)
        live = self.free & (arriving > 0) & (leaving > 0) & (arriving < torch.inf) & (leaving < torch.inf)
        ratio = torch.where(live, leaving, 1) / torch.where(live, arriving, 1)
        log = (ratio.log2() / (4 * (1 + self.degree))).clamp(-math.log2(MOST), math.log2(MOST))
        factor = torch.where(self.exact, log.round(), log).exp2()
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


def _list_places(ends: list[tuple[Tensor, int, int]], count: int, side: int, held: Tensor) -> Tensor:
    """By class, where it stands among the ends of all parameters on one side, filled up with one past the
    last: sums over rows of one length add up in the same order every time."""
    classes = torch.cat([ids.flatten() for ids, _, _ in ends])
    sides = torch.cat([torch.full((ids.numel(),), own) for ids, _, own in ends])
    places = ((sides == side) & ~held[classes]).nonzero().flatten()
    order = classes[places].argsort(stable=True)
    places, owners = places[order], classes[places][order]
    first = torch.searchsorted(owners, torch.arange(count))
    position = torch.arange(len(owners)) - first[owners]
    width = int(position.max()) + 1 if len(owners) else 1
    table = torch.full((count, width), len(classes))
    table[owners, position] = places
    return table
