"""Factors of classes that are products of powers of others: behind a square or a product of activations, of
keys against queries.

A relation is ``x_out = x_a + x_b`` between logarithms of factors. Classes are divided into those that are free
and those that follow from these, with integer powers, so that factors that are powers of two stay such.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

FIXED = 0
"""The unit that cannot be rescaled: what is tied to it cannot be, either."""


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
        if not len(self.derived.of):
            return x
        free = torch.where(self.is_free, x, 0)
        return free.index_add(0, self.derived.of, free[self.derived.by] * self.derived.power.to(x.dtype))

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
    """Solves relations ``x_out = x_a + x_b``, given as columns (out, a, b).

    Args:
        count: of units.
        triples: one relation in each column; all different, and none that only ties two units.
        preferred: by unit, whether it is to be free rather than another.

    Returns:
        The terms of the units that are not free. Those of a sum without terms are one of ``FIXED``.
    """
    numbers = torch.arange(triples.shape[1])
    sides = [
        Terms(numbers, ids, torch.full_like(ids, sign)) for ids, sign in zip(triples, (-1, 1, 1), strict=True)
    ]
    left = add_up(join_terms(sides))
    left = left.select(left.by != FIXED)
    solved: list[Terms] = []
    while len(left.of):
        # A unit that one relation alone is left of can follow from the others there.
        uses = torch.bincount(left.by, minlength=count)
        usable = (uses[left.by] == 1) & (left.power.abs() == 1)
        if not bool(usable.any()):
            # Too entangled for this: what is left is not rescaled, which satisfies all relations.
            solved.append(_fix(left.by.unique()))
            break
        rank = torch.where(usable, left.by + count * (~preferred[left.by]).long(), -1)
        best = rank.new_full((int(left.of.max()) + 1,), -1).scatter_reduce(0, left.of, rank, "amax")
        is_pivot = usable & (rank == best[left.of])
        pivot, sign = (
            torch.zeros_like(best).index_put((left.of[is_pivot],), x[is_pivot]) for x in (left.by, left.power)
        )
        chosen = (best >= 0)[left.of]
        others = left.select(chosen & ~is_pivot)
        solved.append(Terms(pivot[others.of], others.by, -others.power * sign[others.of]))
        alone = left.by[is_pivot & (torch.bincount(left.of)[left.of] == 1)]
        solved.append(_fix(alone))
        left = left.select(~chosen)
    derived = join_terms([])
    for terms in reversed(solved):  # those solved later are in terms of what is free
        follows = torch.isin(terms.by, derived.of)
        expanded = terms.select(follows).expand(derived)
        derived = join_terms([derived, terms.select(~follows), expanded])
    fixed = torch.isin(derived.by, derived.of)
    assert not bool(fixed.any()), "a unit follows from one that is not free"
    summed = add_up(derived)
    gone = derived.of.unique()
    return join_terms(
        [summed.select(summed.by != FIXED), _fix(gone[~torch.isin(gone, summed.of[summed.by != FIXED])])]
    )


def _fix(units: Tensor) -> Terms:
    return Terms(units, torch.full_like(units, FIXED), torch.ones_like(units))
