"""Which units can only be rescaled by one common factor, by tensors of unit numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pathsgd.graph.nodes import Permute, Shape, Stored
from pathsgd.graph.views import view_tensor

FIXED = 0
"""The unit that cannot be rescaled: what is tied to it cannot be, either."""


class UnitTies:
    """Disjoint sets of units, by tensors of their numbers. Tensors have size one along axes on which they do
    not change."""

    def __init__(self) -> None:
        self.count = FIXED + 1
        self._pairs: list[tuple[Tensor, Tensor]] = []

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

    def find_roots(self) -> Tensor:
        """Returns, for each unit, the smallest unit of its class."""
        root = torch.arange(self.count)
        a, b = (torch.cat(units) for units in zip(*self._pairs, strict=True)) if self._pairs else (root, root)
        while True:
            a, b = root[a], root[b]
            apart = a != b
            if not bool(apart.any()):
                return root
            a, b = a[apart], b[apart]
            root.scatter_reduce_(0, torch.maximum(a, b), torch.minimum(a, b), "amin")
            while not torch.equal(root, shorter := root[root]):
                root = shorter

    def fix(self, ids: Tensor) -> None:
        """These units cannot be rescaled."""
        self.tie(ids, torch.full((1,), FIXED))

    def tie_along(self, ids: Tensor, dims: list[int]) -> Tensor:
        """The units along ``dims`` become one class."""
        for dim in dims:
            if ids.shape[dim] > 1:
                first = ids.narrow(dim, 0, 1)
                self._tie_pairs(ids, first.expand(ids.shape))
                ids = first
        return ids

    def to_parameter(self, stored: Stored, edges: Shape, ids: Tensor, shape: Shape) -> Tensor:
        """Ids on a weight's entries, as ids on the entries of its parameter."""
        # An entry of the parameter that is broadcast over several edges ties them together.
        extra = len(edges) - len(stored.shape)
        ids = ids.reshape((1,) * (len(edges) - ids.dim()) + tuple(ids.shape))
        repeated = [d for d in range(len(edges)) if d < extra or stored.shape[d - extra] == 1]
        ids = self.tie_along(ids, repeated)
        ids = ids.reshape(ids.shape[extra:])
        if not stored.views:
            return ids
        permutes = [view for view in stored.views if isinstance(view, Permute)]
        if len(permutes) == len(stored.views):
            for permute in reversed(permutes):
                ids = ids.permute([permute.dims.index(d) for d in range(ids.dim())])
            return ids
        index = torch.arange(math.prod(shape)).reshape(shape)
        for view in stored.views:
            index = view_tensor(view, index)
        places, values = index.flatten(), ids.expand(index.shape).flatten()
        result = torch.full((math.prod(shape),), FIXED)
        result[places] = values
        self.tie(values, result[places])
        return compress(result.reshape(shape))


def compress(ids: Tensor) -> Tensor:
    """``ids`` with size one along every axis on which they do not change."""
    for dim in range(ids.dim()):
        first = ids.narrow(dim, 0, 1) if ids.shape[dim] else ids
        if ids.shape[dim] > 1 and bool((ids == first).all()):
            ids = first
    return ids
