"""UnionFind: one, for regions, unit classes and the components of balancing."""

from __future__ import annotations

from pathsgd.graph.union_find import UnionFind


def test_the_smallest_number_stands_for_its_set():
    sets = UnionFind(4)
    sets.union(3, 1)
    sets.union(2, 3)
    assert [sets.find(k) for k in range(4)] == [0, 1, 1, 1]
    assert sets.grow(2) == range(4, 6)
    sets.union(5, 0)
    assert [sets.find(k) for k in range(len(sets))] == [0, 1, 1, 1, 4, 0]
