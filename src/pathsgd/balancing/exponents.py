"""An exponent for every class, such that the largest weight into it is about 1.

They depend on nothing but the binary exponents of weights: networks that differ by powers of two are the same
network afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pathsgd.balancing.class_edges import ZERO, Edges
from pathsgd.graph.unit_relations import Relations


def find_exponents(largest: Edges, relations: Relations, fixed: Tensor) -> Tensor:
    """An exponent for every class, from the binary exponents of the largest weight of every edge.

    In the order in which walks from units that cannot be rescaled reach them, each class takes what brings
    its largest weight from a known one to 1; then those that lead to known ones; then one is chosen of those
    that are joined to none of these.
    """
    learned = Learned(relations, fixed)
    joined: Tensor | None = None
    while not bool(learned.known.all()):
        if _reach_heads(largest, learned) or _reach_tails(largest, learned):
            continue
        if joined is None:
            joined = _find_joined(largest, relations)
        learned.choose(joined)
    return learned.values


class Learned:
    """What is known of the exponents of classes, or of the logarithms of their factors."""

    def __init__(self, relations: Relations, known: Tensor, values: Tensor | None = None) -> None:
        self.relations, self.known = relations, known.clone()
        self.values = torch.zeros(len(known), dtype=torch.int64) if values is None else values

    def learn(self, classes: Tensor, found: Tensor, sign: int) -> bool:
        """Takes ``sign`` times the largest number found for each class, if it settles a free class."""
        best = torch.full_like(self.values, ZERO).scatter_reduce(0, classes, found, "amax")
        return self.settle((best > ZERO // 2) & ~self.known, sign * best)

    def settle(self, wanted: Tensor, by_class: Tensor) -> bool:
        """Takes for classes what is wanted of them, where it settles a free class; with integers rounded
        down."""
        last = self.relations.find_last(wanted, self.known)
        rest = by_class - self.relations.complete(torch.where(self.known, self.values, 0))
        found = rest[last.of] / last.power
        if not self.values.is_floating_point():
            found = torch.div(rest[last.of], last.power, rounding_mode="floor")
        # What a class has by itself counts before what follows from others.
        own = last.of == last.by
        found, by = (x[own] if bool(own.any()) else x for x in (found, last.by))
        lowest = torch.full_like(self.values, -(1 << 40)).scatter_reduce(0, by, found, "amax")
        new = torch.zeros_like(self.known)
        new[by] = True
        return self.set(new, lowest)

    def set(self, new: Tensor, values: Tensor) -> bool:
        """Settles free classes, and those that follow from these."""
        free = torch.where(new, values, self.values)
        self.known = self.relations.cover(self.known | new)
        self.values = torch.where(self.known, self.relations.complete(free), 0)
        return bool(new.any())

    def choose(self, joined: Tensor) -> None:
        """Leaves the factor of free classes that have no weights, or of the first that is left, at 1."""
        left = ~self.known & self.relations.is_free
        alone = left & ~joined
        first = torch.arange(len(left)) == int(left.nonzero()[0])
        self.set(alone if bool(alone.any()) else first, torch.zeros_like(self.values))


def _reach_heads(edges: Edges, learned: Learned) -> bool:
    progress = False
    for matrix in edges.matrices:
        new, old = ~learned.known[matrix.heads], learned.known[matrix.tails]
        if bool(new.any()) and bool(old.any()):
            at_tail = torch.where(old, -learned.values[matrix.tails], ZERO)
            largest = matrix.find_largest(at_tail)
            progress |= learned.learn(matrix.heads, torch.where(new, largest, ZERO), -1)
    if not progress:
        usable = ~learned.known[edges.heads] & learned.known[edges.tails]
        largest = torch.where(usable, edges.values - learned.values[edges.tails], ZERO)
        progress = learned.learn(edges.heads, largest, -1)
    return progress


def _reach_tails(edges: Edges, learned: Learned) -> bool:
    for matrix in edges.matrices:
        new, old = ~learned.known[matrix.tails], learned.known[matrix.heads]
        if bool(new.any()) and bool(old.any()):
            at_head = torch.where(old, learned.values[matrix.heads], ZERO)
            largest = matrix.find_largest_by_tail(at_head)
            if learned.learn(matrix.tails, torch.where(new, largest, ZERO), 1):
                return True
    usable = ~learned.known[edges.tails] & learned.known[edges.heads]
    largest = torch.where(usable, edges.values + learned.values[edges.heads], ZERO)
    return learned.learn(edges.tails, largest, 1)


def _find_joined(edges: Edges, relations: Relations) -> Tensor:
    """Whether a weight that is not zero leads into a class or out of it, or of one that follows from it."""
    used = edges.values > ZERO // 2
    classes = [edges.heads[used], edges.tails[used]]
    for matrix in edges.matrices:
        classes.append(matrix.heads[matrix.find_largest(torch.zeros_like(matrix.tails)) > ZERO // 2])
        classes.append(matrix.tails[matrix.find_largest_by_tail(torch.zeros_like(matrix.heads)) > ZERO // 2])
    joined = torch.zeros(relations.count, dtype=torch.bool)
    joined[torch.cat(classes)] = True
    joined[relations.derived.by[joined[relations.derived.of]]] = True
    return joined


def find_live(edges: Edges, relations: Relations, fixed: Tensor) -> Tensor:
    """Whether the factor of a class is bounded on both sides where mu is: by weights that are not zero, on
    walks from units that cannot be rescaled and to these."""
    above, below = fixed.clone(), fixed.clone()
    used = edges.values > ZERO // 2
    heads, tails = edges.heads[used], edges.tails[used]
    while True:
        before = above.clone(), below.clone()
        for matrix in edges.matrices:
            if not bool(above[matrix.heads].all()):
                at_tail = torch.where(above[matrix.tails], 0, ZERO)
                above[matrix.heads[matrix.find_largest(at_tail) > ZERO // 2]] = True
        for matrix in reversed(edges.matrices):
            if not bool(below[matrix.tails].all()):
                at_head = torch.where(below[matrix.heads], 0, ZERO)
                below[matrix.tails[matrix.find_largest_by_tail(at_head) > ZERO // 2]] = True
        above[heads[above[tails]]] = True
        below[tails[below[heads]]] = True
        relations.spread_(above, below)
        if torch.equal(before[0], above) and torch.equal(before[1], below):
            live = above & below & ~fixed
            # What follows from others has no minimum if one of these has none.
            return live & relations.cover((live | fixed) & relations.is_free)
