"""Union-find: which things belong together, given in pairs."""

from __future__ import annotations


class UnionFind:
    """Disjoint sets of the numbers 0, 1, 2, ...; the smallest number of a set stands for it."""

    def __init__(self, count: int = 0) -> None:
        self._parent = list(range(count))

    def __len__(self) -> int:
        return len(self._parent)

    def grow(self, count: int) -> range:
        """Adds ``count`` numbers, each a set of its own, and returns them."""
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        return range(start, start + count)

    def find(self, k: int) -> int:
        """The number that stands for the set of ``k``."""
        parent = self._parent
        while parent[k] != k:
            parent[k] = parent[parent[k]]
            k = parent[k]
        return k

    def union(self, a: int, b: int) -> None:
        """Joins the sets of ``a`` and ``b``."""
        low, high = sorted((self.find(a), self.find(b)))
        self._parent[high] = low
