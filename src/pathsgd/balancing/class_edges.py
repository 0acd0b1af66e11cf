"""The weights of a network between its classes of units, which is all that mu_{p,q} and a rescaling see.

Entries of a parameter that join the same two classes (the taps of a kernel, all rows that lead into units
that are not rescaled) are combined into one number. What is left is one matrix for each layer between two
sets of units that can be rescaled, and a short list of all other edges.

A rank that holds a part of a parameter (DTensor) holds that part of its matrix; the list is the same on all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pathsgd.errors import PathError
from pathsgd.graph.unit_classes import FIXED, EdgeClasses
from pathsgd.graph.unit_relations import Relations
from pathsgd.graph.views import compress
from pathsgd.sharding import Shard, local_part, shards_of

CHUNK = (1 << 15) - 1
"""Entries that are taken to fp64 at a time: they stay in the cache, and for more torch would start threads,
which wait for each other longer than they work."""
SMALL = 1 << 10
"""Up to so many edges of a layer are listed, where a matrix costs more than it saves."""
MOST_PIECES = 16
ZERO = -(1 << 30)
"""The binary exponent of 0."""


@dataclass(frozen=True)
class Matrix:
    """The edges from every unit of one layer to every unit of another."""

    values: Tensor
    """The numbers of the edges, by head and tail; of a sharded parameter the part that this rank holds."""
    heads: Tensor
    tails: Tensor
    units: Tensor
    """The unit whose incoming weights a row of ``values`` is, by head; numbered over the whole network."""
    held: tuple[Tensor, Tensor] | None = None
    """Which heads and which tails ``values`` has, if not all."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """The ranks that hold the other parts."""
    log_scale: float = 0.0
    """``values`` are in units of its exponential."""

    def sum_rows(self, at_tails: Tensor) -> Tensor:
        """log of the sums of ``value exp(at_tail)`` over tails, by head."""
        top = float(at_tails.max())
        if top == -math.inf:
            return self.values.new_full((len(self.heads),), top)
        sums = self.values @ self.at_tails((at_tails - top).exp())
        return self.complete(sums, 0).log() + (top + self.log_scale)

    def sum_columns(self, at_heads: Tensor) -> Tensor:
        """log of the sums of ``value exp(at_head)`` over heads, by tail."""
        top = float(at_heads.max())
        if top == -math.inf:
            return self.values.new_full((len(self.tails),), top)
        sums = self.at_heads((at_heads - top).exp()) @ self.values
        return self.complete(sums, 1).log() + (top + self.log_scale)

    def find_largest(self, at_tails: Tensor) -> Tensor:
        """The largest ``value + at_tail`` over tails, by head; of integers."""
        empty = self.values.new_full((len(self.values),), ZERO)
        local = (self.values + self.at_tails(at_tails)).amax(1) if self.values.numel() else empty
        return self.complete(local, 0, largest=True)

    def find_largest_by_tail(self, at_heads: Tensor) -> Tensor:
        """The largest ``value + at_head`` over heads, by tail; of integers."""
        empty = self.values.new_full((self.values.shape[1],), ZERO)
        local = (self.values + self.at_heads(at_heads)[:, None]).amax(0) if self.values.numel() else empty
        return self.complete(local, 1, largest=True)

    def at_tails(self, by_tail: Tensor) -> Tensor:
        """The values, out of those by tail, of the columns that this rank holds."""
        return by_tail if self.held is None else by_tail[self.held[1]]

    def at_heads(self, by_head: Tensor) -> Tensor:
        return by_head if self.held is None else by_head[self.held[0]]

    def complete(self, local: Tensor, axis: int, largest: bool = False) -> Tensor:
        """Sums (or maxima) over all ranks, from those of this rank's rows (axis 0) or columns (axis 1)."""
        if self.held is None:
            return local
        size = len(self.heads) if axis == 0 else len(self.tails)
        whole = local.new_full((size,), ZERO if largest else 0)
        whole[self.held[axis]] = local
        return _over_ranks(whole, self.groups, largest)


@dataclass(frozen=True)
class Edges:
    """All edges between classes that a rescaling changes, with a number for each."""

    matrices: list[Matrix]
    values: Tensor
    """The numbers of the edges that are in no matrix; the fields below are of these edges, too."""
    heads: Tensor
    tails: Tensor
    units: Tensor

    @property
    def is_loop(self) -> Tensor:
        """Whether all equivalents have the same weight there: from a class to itself."""
        return self.heads == self.tails


class EdgeLayout:
    """The layout of a parameter's entries among classes.

    Args:
        tensor: the parameter, or some rows of it.
        edge: its classes, in its own shape.
        fixed: by class, whether it cannot be rescaled or is not to be.
        units: of its entries, the unit whose incoming weights they are, in a shape that broadcasts to the
            parameter's; None if the weights into all units that cannot be rescaled may be added up.
    """

    def __init__(self, tensor: Tensor, edge: EdgeClasses, fixed: Tensor, units: Tensor | None) -> None:
        self.tensor, self.shards = tensor, shards_of(tensor)
        self._groups = tuple(shard.group for shard in self.shards)
        ends = (torch.where(fixed[ids], FIXED, ids) for ids in (edge.head, edge.tail))
        self.head, self.tail = (compress(torch.atleast_1d(ids)) for ids in ends)
        self._merges = units is None
        self._unit = self.head if units is None else compress(torch.atleast_1d(units))
        self.is_changed = bool((self.head != FIXED).any()) or bool((self.tail != FIXED).any())
        self._shape = torch.broadcast_shapes(self.head.shape, self.tail.shape, self._unit.shape)
        self._by_tail = [d for d, n in enumerate(self.tail.shape) if n > 1]
        self._by_head = [d for d, n in enumerate(self._shape) if n > 1 and d not in self._by_tail]
        overlap = any(ids.shape[d] > 1 for ids in (self.head, self._unit) for d in self._by_tail)
        is_large = math.prod(self._shape) > SMALL and bool(self._by_head and self._by_tail)
        self._is_matrix = is_large and not overlap

    def reduce(self, of_entries: Callable[[Tensor, slice], object], largest: bool) -> Edges:
        """One number for each edge.

        Args:
            of_entries: turns entries in fp64 into numbers of 0 and more, in place, given also which rows of
                this rank's part they are.
            largest: whether numbers of one edge are combined by their maximum, not their sum.
        """
        local = torch.atleast_1d(local_part(self.tensor).detach())
        shape = [n if whole > 1 else 1 for n, whole in zip(local.shape, self._shape, strict=True)]
        others = [d for d, n in enumerate(self._shape) if n == 1]
        sums = local.new_zeros(shape, dtype=torch.float64)
        for rows, x in in_double(local):
            of_entries(x, rows)
            x, part = _combine(x, others, largest), at_rows(sums, rows)
            torch.maximum(part, x, out=part) if largest else part.add_(x)
        sums = sums.cpu()
        return self._as_matrix(sums, largest) if self._is_matrix else self._as_list(sums, largest)

    def _as_list(self, sums: Tensor, largest: bool) -> Edges:
        if self.shards:
            whole = torch.zeros(self._shape, dtype=torch.float64)
            cut_ids(whole, self.shards).copy_(sums)
            sums = _over_ranks(whole, self._groups, largest)
        ends = (ids.expand(self._shape).flatten() for ids in (self.head, self.tail, self._unit))
        return self._list_edges(sums.flatten(), *ends)

    def _as_matrix(self, sums: Tensor, largest: bool) -> Edges:
        heads, tails = self._along(self._by_head, self.head), self._along(self._by_tail, self.tail)
        units = self._along(self._by_head, self._unit)
        rows, columns = self._find_held(self._by_head), self._find_held(self._by_tail)
        order = sorted(range(sums.dim()), key=lambda d: (d not in self._by_head, d not in self._by_tail))
        table = sums.permute(order).reshape(len(rows), len(columns))
        # Weights into units that are not rescaled stay apart only where a power is taken of their sums.
        free = (heads != FIXED) | (not self._merges), tails != FIXED
        mask = free[0][rows], free[1][columns]
        upper, lower = _take(table, mask[0], 0), _take(table, ~mask[0], 0)
        values = _take(upper, mask[1], 1)
        places = tuple((f.cumsum(0) - 1)[n[o]] for f, n, o in zip(free, (rows, columns), mask, strict=True))
        held = (places[0], places[1]) if self.shards else None
        heads, tails, units = heads[free[0]], tails[free[1]], units[free[0]]
        matrix = Matrix(values, heads, tails, units, held, self._groups)
        parts = []
        if not bool(free[1].all()):
            sums = matrix.complete(_combine(_take(upper, ~mask[1], 1), [1], largest).flatten(), 0, largest)
            parts.append(self._list_edges(sums, heads, torch.full_like(heads, FIXED), units))
        if not bool(free[0].all()):
            sums = matrix.complete(_combine(_take(lower, mask[1], 1), [0], largest).flatten(), 1, largest)
            fixed = torch.full_like(tails, FIXED)
            parts.append(self._list_edges(sums, fixed, tails, fixed))
        if bool(torch.isin(heads, tails).any()):
            is_loop = matrix.at_heads(heads)[:, None] == matrix.at_tails(tails)
            loops = matrix.complete(_combine(values * is_loop, [1], largest).flatten(), 0, largest)
            parts.append(self._list_edges(loops, heads, heads, units))
            values.masked_fill_(is_loop, 0)
        return replace(join_edges(parts), matrices=[matrix])

    def _list_edges(self, values: Tensor, heads: Tensor, tails: Tensor, units: Tensor) -> Edges:
        edges = Edges([], values, heads, tails, units)
        if not self._merges:
            return edges
        return Edges([], *(x[~edges.is_loop] for x in (values, heads, tails, units)))

    def _along(self, dims: list[int], ids: Tensor) -> Tensor:
        return ids.expand([n if d in dims else 1 for d, n in enumerate(self._shape)]).flatten()

    def _find_held(self, dims: list[int]) -> Tensor:
        """The numbers, along these dimensions, of the entries that this rank holds."""
        shape = [n if d in dims else 1 for d, n in enumerate(self._shape)]
        return cut_ids(torch.arange(math.prod(shape)).reshape(shape), self.shards).flatten()


def cut_rows(
    tensor: Tensor, edge: EdgeClasses, units: Tensor | None
) -> list[tuple[Tensor, EdgeClasses, Tensor | None]]:
    """A parameter, its classes and its units in pieces whose rows lead from or to the same units, as queries
    and the keys beside them do not; in one if they would be many, or if it is sharded."""
    starts = {0}
    for ids in (edge.head, edge.tail):
        if ids.dim() > 1 and ids.shape[0] > 1 and math.prod(ids.shape[1:]) > 1:
            starts |= set(((ids[1:] != ids[:-1]).flatten(1).any(1).nonzero().flatten() + 1).tolist())
    if not 1 < len(starts) <= MOST_PIECES or shards_of(tensor):
        return [(tensor, edge, units)]
    pieces = [slice(*ends) for ends in itertools.pairwise([*sorted(starts), len(tensor)])]
    heads, tails = ([at_rows(ids, rows) for rows in pieces] for ids in (edge.head, edge.tail))
    own = [None if units is None else at_rows(units, rows) for rows in pieces]
    return list(zip([tensor[rows] for rows in pieces], map(EdgeClasses, heads, tails), own, strict=True))


def join_edges(parts: list[Edges]) -> Edges:
    empty = torch.empty(0, dtype=torch.int64)
    names = ("values", "heads", "tails", "units")
    joined = (torch.cat([getattr(part, name) for part in parts] or [empty]) for name in names)
    return Edges([matrix for part in parts for matrix in part.matrices], *joined)


def find_largest(layout: EdgeLayout) -> Edges:
    """The binary exponent of the largest weight of every edge."""

    def exponent(x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.frexp(x.double()).exponent.long(), ZERO)

    largest_of = layout.reduce(lambda x, rows: x.abs_(), largest=True)
    matrices = [replace(matrix, values=exponent(matrix.values)) for matrix in largest_of.matrices]
    return replace(largest_of, matrices=matrices, values=exponent(largest_of.values))


class Norms(NamedTuple):
    """The norms whose mean gain is to be 1: by class the number of the one whose gains lead into it, from 1,
    and 0 of others; and the names of these gains."""

    number: Tensor
    gains: Collection[str]


def find_largest_into(layouts: list[EdgeLayout], wanted: Tensor, exponents: Tensor) -> Tensor:
    """log of the largest weight into each class that is wanted, rescaled; -inf of others."""
    own = [layout for layout in layouts if bool(wanted[layout.head].any())]
    edges = join_edges([layout.reduce(lambda x, rows: x.abs_(), largest=True) for layout in own])
    mantissa, exponent = torch.frexp(edges.values.double())
    logs = mantissa.log() + (exponent + exponents[edges.heads]).double() * math.log(2)
    nothing = torch.full((len(wanted),), -math.inf, dtype=torch.float64)
    return torch.where(wanted, nothing.scatter_reduce(0, edges.heads, logs, "amax"), nothing)


def find_highest(sizes: Edges, exponents: Tensor) -> int:
    """The largest binary exponent of a parameter's rescaled entries."""
    highest = [ZERO]
    for matrix in sizes.matrices:
        at_head, at_tail = exponents[matrix.heads], -exponents[matrix.tails]
        highest.append(int((matrix.find_largest(at_tail) + at_head).max()))
    if len(sizes.values):
        listed = sizes.values + exponents[sizes.heads] - exponents[sizes.tails]
        highest.append(int(listed.max()))
    return max(highest) if max(highest) > ZERO // 2 else 0


def sum_powers(layout: EdgeLayout, p: float, exponents: Tensor, shift: int) -> Edges:
    """The sum of ``|w 2^(e_head - e_tail - shift)|^p`` of every edge, given e of every class."""
    head, tail = (exponents[cut_ids(ids, layout.shards)] for ids in (layout.head, layout.tail))
    factors = split_factors(head, tail + shift, layout.tensor.device)

    def of_entries(x: Tensor, rows: slice) -> None:
        for factor in factors:
            x.mul_(at_rows(factor, rows))
        raise_to(x, p)

    return layout.reduce(of_entries, largest=False)


@dataclass(frozen=True)
class ClassFactors:
    """The factor of every class, ``mantissa * 2^exponent``: alone it may be out of the range of floats."""

    mantissa: Tensor
    exponent: Tensor

    def power(self, power: int) -> ClassFactors:
        return ClassFactors(self.mantissa**power, power * self.exponent)

    def complete(self, relations: Relations) -> ClassFactors:
        """With the factors of classes that follow from those of free ones."""
        terms = relations.derived
        powers = self.mantissa[terms.by] ** terms.power
        mantissa = self.mantissa.index_fill(0, terms.of, 1).scatter_reduce(0, terms.of, powers, "prod")
        return ClassFactors(mantissa, relations.complete(self.exponent))

    def scale_(self, tensor: Tensor, edge: EdgeClasses) -> None:
        """Multiplies every entry of a parameter, or of what is shaped as one, by ``factor(head) /
        factor(tail)``, in fp64."""
        ends = torch.cat([edge.head.flatten(), edge.tail.flatten()])
        if bool((self.exponent[ends] == 0).all() & (self.mantissa[ends] == 1).all()):
            return
        edge, tensor = cut_edges(edge, shards_of(tensor)), torch.atleast_1d(local_part(tensor).detach())
        if not tensor.numel():
            tensor.zero_()  # other ranks write theirs, and an optimizer on all of them looks for writes
        head, tail = torch.atleast_1d(edge.head, edge.tail)
        at_head, at_tail = split_factors(self.exponent[head], self.exponent[tail], tensor.device)
        at_head = at_head * self.mantissa[head].to(tensor.device)
        at_tail = at_tail / self.mantissa[tail].to(tensor.device)
        factors = [x for x in (at_head, at_tail) if bool((x != 1).any())]
        for rows, x in in_double(tensor):
            for factor in factors:
                x.mul_(at_rows(factor, rows))
            tensor[rows] = x


def add_shifts(tensors: Mapping[str, Tensor], shifts: Mapping[str, float]) -> dict[str, Tensor]:
    """The tensors, with copies in place of those that the network adds a number to, as 1 to a gain."""
    acting = dict(tensors)
    for name, shift in shifts.items():
        if name in tensors:
            if tensors[name].element_size() < 4:
                raise PathError(f"{name!r} had more bits when the model was traced; trace it again")
            acting[name] = tensors[name].detach() + shift
    return acting


def in_double(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some rows of a tensor at a time, in fp64: which they are, and a buffer that may be written to."""
    step = CHUNK * (64 if tensor.is_cuda else 1) // max(1, math.prod(tensor.shape[1:])) or 1
    buffer = torch.empty_like(tensor[:step], dtype=torch.float64)
    for start in range(0, len(tensor) if tensor.numel() else 0, step):
        part = tensor[start : start + step]
        yield slice(start, start + len(part)), buffer[: len(part)].copy_(part)


def raise_to(x: Tensor, p: float) -> Tensor:
    """``|x|^p``, in place."""
    return x.mul_(x) if p == 2 else x.abs_().pow_(p)


def at_rows(x: Tensor, rows: slice) -> Tensor:
    """Some rows, along the first axis, of what has one for each or one for all."""
    return x[rows] if len(x) > 1 else x


def split_factors(head: Tensor, tail: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """``2^head`` and ``2^-tail``, but for a common factor: alone they may be out of range."""
    highest = head.max() if head.numel() else 0
    at_head, at_tail = (head - highest).to(device), (highest - tail).to(device)
    return torch.exp2(at_head.double()), torch.exp2(at_tail.double())


def cut_edges(edge: EdgeClasses, shards: tuple[Shard, ...]) -> EdgeClasses:
    """The classes at the ends of the entries that this rank holds."""
    return EdgeClasses(cut_ids(edge.head, shards), cut_ids(edge.tail, shards))


def cut_ids(ids: Tensor, shards: tuple[Shard, ...]) -> Tensor:
    """The part of ids for the entries that this rank holds; ids have size one where they do not change."""
    for shard in shards:
        if ids.shape[shard.dim] > 1:
            ids = ids.narrow(shard.dim, shard.start, shard.length)
    return ids


def _take(table: Tensor, chosen: Tensor, dim: int) -> Tensor:
    """The chosen entries along a dimension: a view, if they are in one piece."""
    index = chosen.nonzero().flatten()
    if len(index) and int(index[-1] - index[0]) == len(index) - 1:
        return table.narrow(dim, int(index[0]), len(index))
    return table.index_select(dim, index)


def _combine(x: Tensor, dims: list[int], largest: bool) -> Tensor:
    if not dims:
        return x
    return x.amax(dims, keepdim=True) if largest and x.numel() else x.sum(dims, keepdim=True)


def _over_ranks(values: Tensor, groups: tuple[dist.ProcessGroup, ...], largest: bool) -> Tensor:
    for group in groups:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        moved = values.to(device)
        dist.all_reduce(moved, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        values = moved.cpu()
    return values
