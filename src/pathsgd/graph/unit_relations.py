"""Factors of classes that are products of powers of others: behind a square or a product of activations, of
keys against queries.

A relation is ``x_out = x_a + x_b`` between logarithms of factors. Classes are divided into those that are
free and those that follow from these, with integer powers, so that factors that are powers of two stay such.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

FIXED = 0
"""The unit that cannot be rescaled: what is tied to it cannot be, either."""
NEVER = -(1 << 62)


@dataclass(frozen=True)
class Terms:
    """``x[of] += power x[by]``, one entry for each term of each sum."""

    of: Tensor
    by: Tensor
    power: Tensor

    def select(self, chosen: Tensor) -> Terms:
        return Terms(self.of[chosen], self.by[chosen], self.power[chosen])

    def to(self, device: torch.device) -> Terms:
        return Terms(self.of.to(device), self.by.to(device), self.power.to(device))

    def expand(self, others: Terms) -> Terms:
        """These terms with those in their place that ``others`` has for what they are taken of."""
        order = others.of.argsort(stable=True)
        owners = others.of[order]
        start, stop = (torch.searchsorted(owners, self.by, right=right) for right in (False, True))
        number = stop - start
        index = torch.arange(len(self.by)).repeat_interleave(number)
        offset = torch.arange(len(index)) - (number.cumsum(0) - number)[index]
        found = order[start[index] + offset]
        return Terms(self.of[index], others.by[found], self.power[index] * others.power[found])


def join_terms(parts: list[Terms]) -> Terms:
    empty = torch.empty(0, dtype=torch.int64)
    return Terms(*(torch.cat([empty, *(getattr(part, n) for part in parts)]) for n in ("of", "by", "power")))


def add_up(terms: Terms) -> Terms:
    """One term for each class and what it is taken of, without those that cancel."""
    size = int(terms.by.max()) + 1 if len(terms.by) else 1
    pairs, number = (terms.of * size + terms.by).unique(return_inverse=True)
    power = torch.zeros_like(pairs).index_add(0, number, terms.power)
    return Terms(pairs // size, pairs % size, power).select(power != 0)


class Relations:
    """Which classes are free, and how the others follow.

    Attributes:
        count: how many classes there are, with class 0, which cannot be rescaled.
        is_free: by class.
        derived: the terms of classes that are not free.
        terms: those of free ones, too: each is itself.
        rate: by free class, the largest power with which its factor enters another; at least 1.
    """

    def __init__(self, count: int, derived: Terms) -> None:
        self.count, self.derived = count, derived
        self.is_free = torch.ones(count, dtype=torch.bool)
        self.is_free[FIXED] = self.is_free[derived.of] = False
        free = self.is_free.nonzero().flatten()
        self.terms = join_terms([Terms(free, free, torch.ones_like(free)), derived])
        self.rate = torch.ones(count, dtype=torch.int64)
        self.rate.scatter_reduce_(0, derived.by, derived.power.abs(), "amax")

    def to(self, device: torch.device) -> Relations:
        """The same on another device."""
        moved = copy.copy(self)
        moved.is_free, moved.rate = self.is_free.to(device), self.rate.to(device)
        moved.derived, moved.terms = self.derived.to(device), self.terms.to(device)
        return moved

    @property
    def related(self) -> Tensor:
        """Whether a class takes part in a relation, by class."""
        related = torch.zeros(self.count, dtype=torch.bool)
        related[self.derived.of] = related[self.derived.by] = True
        return related

    def complete(self, x: Tensor) -> Tensor:
        """Logarithms or exponents of factors by class, from those of free classes."""
        terms = self.derived
        if not len(terms.of):
            return x
        return x.index_fill(0, terms.of, 0).index_add(0, terms.of, x[terms.by] * terms.power.to(x.dtype))

    def hold(self, held: Tensor) -> Tensor:
        """Which classes keep their factors if these do. All that a held one is a product of does."""
        held = held.clone()
        held[self.derived.by[held[self.derived.of]]] = True
        return self.cover(held)

    def cover(self, free: Tensor) -> Tensor:
        """Whether all that a class is a product of is among these free classes, by class."""
        covered = free | ~self.is_free
        covered[self.derived.of[~free[self.derived.by]]] = False
        return covered

    def find_last(self, wanted: Tensor, known: Tensor) -> Terms:
        """The terms of wanted classes that are the only ones of theirs that are not known."""
        unknown = ~known[self.terms.by]
        number = self._count(self.terms, unknown)
        return self.terms.select(unknown & wanted[self.terms.of] & (number[self.terms.of] == 1))

    def spread_(self, above: Tensor, below: Tensor) -> None:
        """Given which factors are bounded from above and which from below: a product of such is, and so is
        the rest of one that is."""
        terms = self.derived
        positive = terms.power > 0
        for bounded, opposite in ((above, below), (below, above)):
            same = torch.where(positive, bounded[terms.by], opposite[terms.by])
            other = torch.where(positive, opposite[terms.by], bounded[terms.by])
            bounded |= ~self.is_free & (self._count(terms, ~same) == 0)
            rest = self._count(terms, ~other)[terms.of] - (~other).long()
            last = bounded[terms.of] & (rest == 0)
            bounded[terms.by[last & positive]] = True
            opposite[terms.by[last & ~positive]] = True

    def _count(self, terms: Terms, chosen: Tensor) -> Tensor:
        """The number of a class's terms that are chosen, by class."""
        return torch.zeros(self.count, dtype=torch.int64).index_add(0, terms.of, chosen.long())


def find_free(count: int, triples: Tensor, preferred: Tensor) -> Terms:
    """Solves relations ``x_out = x_a + x_b``, given as columns (out, a, b), by elimination in rounds.

    Args:
        count: of units.
        triples: one relation in each column.
        preferred: by unit, whether it is to be free rather than another.

    Returns:
        The terms of the units that are not free. A sum of nothing has one term, ``FIXED``.
    """
    number = torch.arange(triples.shape[1])
    signs = zip(triples, (-1, 1, 1), strict=True)
    left = add_up(join_terms([Terms(number, ids, torch.full_like(ids, sign)) for ids, sign in signs]))
    left = left.select(left.by != FIXED)
    solved: list[Terms] = []
    while len(left.of):
        is_pivot = _choose_pivots(left, count, preferred)
        if not bool(is_pivot.any()):  # none has power 1: what is left stays as it is, which solves it
            solved.append(_fix(left.by.unique()))
            break
        solving = torch.isin(left.of, left.of[is_pivot])
        pivots = torch.zeros(int(left.of.max()) + 1, dtype=torch.int64)
        power = pivots.index_put((left.of[is_pivot],), left.power[is_pivot])
        pivots[left.of[is_pivot]] = left.by[is_pivot]
        rest = left.select(solving & ~is_pivot)
        found = Terms(pivots[rest.of], rest.by, -rest.power * power[rest.of])
        alone = pivots[left.of[is_pivot]]
        found = join_terms([found, _fix(alone[~torch.isin(alone, found.of)])])
        solved.append(found)
        left = _substitute(left.select(~solving), found)
    derived = join_terms([])
    for found in reversed(solved):  # what was solved later is in terms of what is free
        derived = join_terms([derived, _substitute(found, derived, unique=False)])
    nothing = derived.of.unique()
    derived = derived.select(derived.by != FIXED)
    return join_terms([derived, _fix(nothing[~torch.isin(nothing, derived.of)])])


def _choose_pivots(left: Terms, count: int, preferred: Tensor) -> Tensor:
    """Which terms to solve their relations for: at most one of each relation, in no other of these."""
    uses = torch.bincount(left.by, minlength=count)
    most = int(uses.max()) + 1
    rank = left.by + count * (most * (~preferred[left.by]).long() - uses[left.by])
    rank = torch.where(left.power.abs() == 1, rank, NEVER)
    relations = int(left.of.max()) + 1
    best = rank.new_full((relations,), NEVER).scatter_reduce(0, left.of, rank, "amax")
    is_best = (rank == best[left.of]) & (rank != NEVER)
    first = rank.new_full((count,), relations).scatter_reduce(
        0, left.by[is_best], left.of[is_best], "amin"
    )  # by unit, the relation that is solved for it
    is_pivot = is_best & (first[left.by] == left.of)
    solved = torch.zeros(relations, dtype=torch.bool)
    solved[left.of[is_pivot]] = True
    others = solved[left.of] & ~is_pivot & (first[left.by] < relations)
    later = torch.maximum(left.of[others], first[left.by[others]])
    solved[later] = False
    return is_pivot & solved[left.of]


def _substitute(terms: Terms, found: Terms, unique: bool = True) -> Terms:
    """Sums with what was found for some of their terms in the place of these; if they are relations, each
    once."""
    follows = torch.isin(terms.by, found.of)
    terms = add_up(join_terms([terms.select(~follows), terms.select(follows).expand(found)]))
    if not unique:
        return terms
    terms = terms.select(terms.by != FIXED)
    if not len(terms.of):
        return terms
    # Relations are equal if sums of random numbers are, modulo 2^64.
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(1 << 62), 1 << 62, (int(terms.by.max()) + 1,), generator=generator)
    sums = torch.zeros(int(terms.of.max()) + 1, dtype=torch.int64)
    sums.index_add_(0, terms.of, terms.power * numbers[terms.by])
    used = terms.of.unique()
    _, place = sums[used].abs().unique(return_inverse=True)
    first = torch.full_like(used, NEVER).scatter_reduce(0, place, -used, "amax").neg()[place]
    return terms.select(torch.isin(terms.of, used[first == used]))


def _fix(units: Tensor) -> Terms:
    return Terms(units, torch.full_like(units, FIXED), torch.ones_like(units))
