"""Which units can only be rescaled by one common factor, by tensors of unit numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pathsgd.graph.nodes import Reshape, Shape, Stored
from pathsgd.graph.unit_relations import FIXED, Terms, find_free
from pathsgd.graph.views import compress, undo_view, view_shape

UNSEEN = -1
"""In place of a unit: no edge is there."""


class UnitTies:
    """Disjoint sets of units, and relations between these, by tensors of unit numbers. Tensors have size one
    along axes on which they do not change."""

    def __init__(self) -> None:
        self.count = FIXED + 1
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._triples: list[Tensor] = []

    def fresh(self, shape: Shape) -> Tensor:
        """Units of their own."""
        start, self.count = self.count, self.count + math.prod(shape)
        return torch.arange(start, self.count).reshape(shape)

    def tie(self, a: Tensor, b: Tensor) -> None:
        """Units in the same place become one class."""
        ndim = max(a.dim(), b.dim())
        a, b = (ids.reshape((1,) * (ndim - ids.dim()) + tuple(ids.shape)) for ids in (a, b))
        # What does not change along an axis ties all that the other has there: so neither is expanded.
        a, b = (
            self.tie_along(ids, [d for d in range(ndim) if other.shape[d] == 1])
            for ids, other in ((a, b), (b, a))
        )
        self._tie_pairs(*torch.broadcast_tensors(a, b))  # one may be empty

    def _tie_pairs(self, a: Tensor, b: Tensor) -> None:
        different = a != b
        self._pairs.append((a[different], b[different]))

    def relate(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        """The factor of ``out`` is the product of those of the other two."""
        self._triples.append(torch.stack([ids.flatten() for ids in torch.broadcast_tensors(out, a, b)]))

    def find_roots(self) -> Tensor:
        """Returns, for each unit, the smallest unit of its class."""
        root, pairs = torch.arange(self.count), self._pairs
        while True:
            root = _join(root, pairs)
            pairs = _find_ties(self._find_triples(root))
            if not pairs:
                return root
            self._pairs = self._pairs + pairs

    def solve(self, preferred: Tensor) -> tuple[Tensor, Terms]:
        """Returns the roots of all units, and the terms of roots that are not free. ``preferred`` tells which
        units are to be free rather than others."""
        while True:
            root = self.find_roots()
            by_root = torch.zeros(self.count, dtype=torch.bool)
            by_root[root[preferred]] = True
            derived = find_free(self.count, self._find_triples(root), by_root)
            number = torch.bincount(derived.of, minlength=self.count)
            single = derived.select(number[derived.of] == 1)
            # The first of those that are the same power of one class; with power 1 that is the class itself.
            powers, group = torch.stack([single.by, single.power]).unique(dim=1, return_inverse=True)
            first = torch.full_like(powers[0], self.count).scatter_reduce(0, group, single.of, "amin")
            first = torch.where(powers[1] == 1, powers[0], first)
            if bool((first[group] == single.of).all()):
                return root, derived
            self._tie_pairs(single.of, first[group])

    def _find_triples(self, root: Tensor) -> Tensor:
        """The relations that are more than a tie, by roots, each once."""
        if not self._triples:
            return torch.empty(3, 0, dtype=torch.int64)
        out, a, b = root[torch.cat(self._triples, 1)]
        a, b = torch.minimum(a, b), torch.maximum(a, b)
        pairs, number = (out * self.count + a).unique(return_inverse=True)  # faster than unique(dim=1)
        unique = (number * self.count + b).unique()
        pairs = pairs[unique // self.count]
        triples = torch.stack([pairs // self.count, pairs % self.count, unique % self.count])
        is_tie = (triples[1] == FIXED) & (triples[0] == triples[2])
        return triples[:, ~is_tie]

    def fix(self, ids: Tensor) -> None:
        """These units cannot be rescaled."""
        self.tie(ids, torch.full((1,), FIXED))

    def tie_along(self, ids: Tensor, dims: list[int]) -> Tensor:
        """The units along ``dims`` become one class."""
        for dim in dims:
            if ids.shape[dim] == 0:  # the sum of nothing
                ids = self.fresh((*ids.shape[:dim], 1, *ids.shape[dim + 1 :]))
            elif ids.shape[dim] > 1:
                first = ids.narrow(dim, 0, 1)
                self._tie_pairs(ids, first.expand(ids.shape))
                ids = first
        return ids

    def to_parameter(self, stored: Stored, edges: Shape, ids: Tensor, shape: Shape) -> Tensor:
        """Ids on a weight's entries, as ids on the entries of its parameter; UNSEEN where it has none."""
        views = list(stored.views)
        if ids.dim() > len(edges):  # of a convolution in groups
            if views and isinstance(views[-1], Reshape):
                views.pop()  # along its axes nothing may be uniform
            views.append(Reshape((len(ids), edges[0] // len(ids), *edges[1:])))
        else:
            # An entry of the parameter that is broadcast over several edges ties them together.
            extra = len(edges) - len(stored.shape)
            ids = ids.reshape((1,) * (len(edges) - ids.dim()) + tuple(ids.shape))
            repeated = [d for d in range(len(edges)) if d < extra or stored.shape[d - extra] == 1]
            ids = self.tie_along(ids, repeated)
            ids = ids.reshape(ids.shape[extra:])
        shapes = [shape]
        for view in views:
            shapes.append(view_shape(view, shapes[-1]))
        for view, before, seen in reversed(list(zip(views, shapes, shapes[1:], strict=False))):
            ids = undo_view(view, ids, before, seen, self.tie_along, UNSEEN)
        return ids

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        """The ids of both: where both are seen they become one class."""
        if bool((a != UNSEEN).all() & (b != UNSEEN).all()):
            self.tie(a, b)
            return a
        a, b = torch.broadcast_tensors(a, b)
        both = (a != UNSEEN) & (b != UNSEEN)
        self._tie_pairs(a[both], b[both])
        return compress(torch.where(a == UNSEEN, b, a))

    def fill_in(self, ids: Tensor) -> Tensor:
        """Along axes of which only a part is seen, as of positions, one class for all: a longer input may
        read the rest."""
        dims = []
        for dim in range(ids.dim()):
            is_seen = (ids != UNSEEN).movedim(dim, 0).flatten(1).any(1) if ids.dim() > 1 else ids != UNSEEN
            if not bool(is_seen.all()):
                ids = ids.index_select(dim, is_seen.nonzero().flatten())
                dims.append(dim)
        if bool((ids == UNSEEN).any()):
            self.fix(ids[ids != UNSEEN])
            return torch.full((1,) * ids.dim(), FIXED)
        return self.tie_along(ids, dims)


def _join(root: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The roots after these pairs are tied, too."""
    a, b = (torch.cat([root[:0], *units]) for units in (zip(*pairs, strict=True) if pairs else ((), ())))
    while True:
        a, b = root[a], root[b]
        apart = a != b
        if not bool(apart.any()):
            return root
        a, b = a[apart], b[apart]
        root = root.scatter_reduce(0, torch.maximum(a, b), torch.minimum(a, b), "amin")
        while not torch.equal(root, shorter := root[root]):
            root = shorter


def _find_ties(triples: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The units that relations ``x_out = x_a + x_b`` tie, with a <= b: where one of the three is nothing, or
    where two relations have two in common."""
    out, a, b = triples
    zero, doubled = torch.full_like(out, FIXED), a == b
    ties = [
        (a == FIXED, out, b), (out == a, b, zero), (out == b, a, zero), (doubled & (out == FIXED), a, zero),
    ]  # fmt: skip
    for first, second, third in (
        (a, b, out),
        (torch.cat([out, out]), torch.cat([a, b]), torch.cat([b, a])),
        (out[doubled], zero[doubled], a[doubled]),
    ):
        key, order = (first * (int(triples.max()) + 1 if triples.numel() else 1) + second).sort(stable=True)
        ties.append((key[1:] == key[:-1], third[order][1:], third[order][:-1]))
    chosen = [(x[where & (x != y)], y[where & (x != y)]) for where, x, y in ties]
    return [pair for pair in chosen if len(pair[0])]
