"""The weights of a network between its classes of units, which is all that mu_{p,q} and a rescaling see.

Entries of a parameter that join the same two classes (the taps of a kernel, all rows that lead into units
that are not rescaled) are combined into one number. What is left is one matrix for each layer between two
sets of units that can be rescaled, and a short list of all other edges.

A rank that holds a part of a parameter (DTensor) holds that part of its matrix; the list is the same on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pathsgd.geometry.extended_float import exact_ldexp
from pathsgd.geometry.sharded import Shard, local_part, shards_of
from pathsgd.graph.unit_classes import FIXED, EdgeClasses
from pathsgd.graph.unit_ties import compress

CHUNK = 1 << 18
"""Entries that are taken to fp64 at a time, so that they stay in the cache."""
ZERO = -(1 << 30)
"""The binary exponent of 0."""

Combine = Callable[[Tensor, int], Tensor]
"""``sum`` or ``amax`` along a dimension."""


@dataclass(frozen=True)
class Matrix:
    """The edges from every unit of one layer to every unit of another."""

    values: Tensor
    """By head and tail; of a sharded parameter the part that this rank holds."""
    heads: Tensor
    tails: Tensor
    degree: int
    rows: Tensor
    """By head, the unit whose incoming weights it is, numbered over the whole network."""
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
        """Of values by tail, those of the columns that this rank holds."""
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
    """Of the edges that are in no matrix, as are those below."""
    heads: Tensor
    tails: Tensor
    degrees: Tensor
    rows: Tensor


class EdgeLayout:
    """Where the entries of one parameter lie among classes.

    Args:
        name: of the parameter.
        edge: its classes, in its own shape.
        fixed: by class, whether it cannot be rescaled or is not to be.
        rows: of its entries, the unit whose incoming weights they are; its shape broadcasts to the
            parameter's.
        merge_rows: whether the weights into all units that cannot be rescaled may be added up.
        tensor: the parameter.
    """

    def __init__(
        self, name: str, edge: EdgeClasses, fixed: Tensor, rows: Tensor, merge_rows: bool, tensor: Tensor
    ) -> None:
        self.name, self.degree = name, edge.degree
        self.shards: tuple[Shard, ...] = shards_of(tensor)
        head = compress(torch.where(fixed[edge.head], FIXED, edge.head))
        tail = compress(torch.where(fixed[edge.tail], FIXED, edge.tail))
        row = compress(rows) if not merge_rows else head
        by_head = [d for d in range(tensor.dim()) if head.shape[d] > 1 or row.shape[d] > 1]
        by_tail = [d for d in range(tensor.dim()) if tail.shape[d] > 1]
        self.is_matrix = not set(by_head) & set(by_tail)
        if not self.is_matrix:
            by_head, by_tail = sorted({*by_head, *by_tail}), []
        rest = [d for d in range(tensor.dim()) if d not in (*by_head, *by_tail)]
        self.order = (*by_head, *by_tail, *rest)
        size = [tensor.shape[d] for d in by_head]

        def along(ids: Tensor, dims: list[int]) -> Tensor:
            shape = [n if d in dims else 1 for d, n in enumerate(tensor.shape)]
            return ids.expand(shape).flatten()

        self.heads, self.rows = along(head, by_head), along(row, by_head)
        self.tails = along(tail, by_tail if self.is_matrix else by_head)
        self.count = math.prod(size), (math.prod(tensor.shape[d] for d in by_tail))
        self._dims = by_head, by_tail
        self._shape = tuple(tensor.shape)
        # Rows into units that are not rescaled stay apart only where a power is taken of their sums.
        self.free_rows = (
            (self.heads != FIXED).nonzero().flatten() if merge_rows else torch.arange(len(self.heads))
        )
        self.free_tails = (self.tails != FIXED).nonzero().flatten()
        self.is_changed = bool((self.heads != FIXED).any()) or bool((self.tails != FIXED).any())

    def reduce(
        self, tensor: Tensor, of_entries: Callable[[Tensor, Tensor, Tensor], Tensor], largest: bool
    ) -> Edges:
        """One number for each edge.

        Args:
            tensor: the parameter.
            of_entries: from entries (head, tail, others) and the numbers of their heads and tails to
                numbers (head, tail).
            largest: whether numbers of one edge are combined by their maximum, not their sum.
        """
        combine: Combine = (lambda x, d: x.amax(d)) if largest else (lambda x, d: x.sum(d))
        if not self.is_matrix:
            whole = tensor.full_tensor() if self.shards else tensor  # type: ignore[attr-defined]
            view = whole.detach().permute(self.order).reshape(self.count[0], 1, -1)
            heads = torch.arange(self.count[0])
            found = torch.cat([of_entries(part, rows, rows) for part, rows in _chunks(view, heads)])[:, 0]
            # A weight from a class to itself is the same in all equivalents.
            kept = (self.heads != self.tails) | (self.degree != 1)
            return self._as_list(found[kept], self.heads[kept], self.tails[kept], self.rows[kept])
        rows, columns = (self._held(dims) for dims in self._dims)
        view = local_part(tensor).detach().permute(self.order)
        others = math.prod(view.shape[len(self._dims[0]) + len(self._dims[1]) :])
        view = view.reshape(len(rows), len(columns), others)
        if not others:  # there are more ranks than rows; a zero counts for nothing
            view = view.new_zeros(len(rows), len(columns), 1)
        free = torch.isin(columns, self.free_tails)
        free_columns, fixed_columns = _as_index(free), _as_index(~free)
        is_free_row = torch.isin(torch.arange(self.count[0]), self.free_rows)
        between, from_fixed, into_fixed = [], [], []
        for part, held in _chunks(view, rows):
            numbers = of_entries(part, held, columns)
            own = is_free_row[held]
            chosen = numbers[_as_index(own)]
            between.append(chosen[:, free_columns])
            if not bool(free.all()):
                from_fixed.append(combine(chosen[:, fixed_columns], 1))
            if not bool(own.all()):
                into_fixed.append(combine(numbers[_as_index(~own)], 0)[free_columns])
        groups = tuple(shard.group for shard in self.shards)
        matrices = []
        lists = []
        if len(self.free_rows) and len(self.free_tails):
            values = torch.cat(between)
            heads, tails = self.heads[self.free_rows], self.tails[self.free_tails]
            matrix = Matrix(values, heads, tails, self.degree, self.rows[self.free_rows])
            if self.shards:
                places = (_places(self.free_rows, rows), _places(self.free_tails, columns))
                matrix = replace(matrix, held=places, groups=groups)
            if self.degree == 1:
                own_heads, own_tails = matrix.at_heads(heads), matrix.at_tails(tails)
                values.masked_fill_(own_heads[:, None] == own_tails, 0)
            matrices.append(matrix)
        if len(self.free_rows) and len(self.free_tails) < self.count[1]:
            found = _spread(from_fixed, rows[is_free_row[rows]], self.count[0])
            found = _over_ranks(found, groups, largest)[self.free_rows]
            heads = self.heads[self.free_rows]
            lists.append(
                self._as_list(found, heads, torch.full_like(heads, FIXED), self.rows[self.free_rows])
            )
        if len(self.free_rows) < self.count[0] and len(self.free_tails):
            merged = [combine(torch.stack(into_fixed), 0)] if into_fixed else []
            found = _spread(merged, columns[free], self.count[1])
            found = _over_ranks(found, groups, largest)[self.free_tails]
            tails = self.tails[self.free_tails]
            fixed = torch.full_like(tails, FIXED)
            lists.append(self._as_list(found, fixed, tails, fixed))
        joined = join_edges(lists)
        return replace(joined, matrices=matrices)

    def _as_list(self, values: Tensor, heads: Tensor, tails: Tensor, rows: Tensor) -> Edges:
        return Edges([], values, heads, tails, torch.full_like(heads, self.degree), rows)

    def _held(self, dims: list[int]) -> Tensor:
        """The numbers, along these dimensions, of the entries that this rank holds."""
        shape = [self._shape[d] for d in dims]
        numbers = torch.arange(math.prod(shape)).reshape(shape)
        for shard in self.shards:
            if shard.dim in dims:
                numbers = numbers.narrow(dims.index(shard.dim), shard.start, shard.length)
        return numbers.flatten()


def join_edges(parts: list[Edges]) -> Edges:
    empty = torch.empty(0, dtype=torch.int64)

    def join(name: str) -> Tensor:
        found = [getattr(part, name) for part in parts]
        return torch.cat(found) if found else empty

    matrices = [matrix for part in parts for matrix in part.matrices]
    return Edges(matrices, *map(join, ("values", "heads", "tails", "degrees", "rows")))


def find_largest(layout: EdgeLayout, tensor: Tensor) -> Edges:
    """The binary exponent of the largest weight of every edge."""

    def of_entries(entries: Tensor, heads: Tensor, tails: Tensor) -> Tensor:
        return (
            torch.linalg.vector_norm(entries, math.inf, dim=2).cpu()
            if entries.shape[2] > 1
            else entries[:, :, 0].abs().cpu()
        )

    def exponent(x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.frexp(x.double()).exponent.long(), ZERO)

    found = layout.reduce(tensor, of_entries, largest=True)
    matrices = [replace(matrix, values=exponent(matrix.values)) for matrix in found.matrices]
    return replace(found, matrices=matrices, values=exponent(found.values))


def sum_powers(layout: EdgeLayout, tensor: Tensor, p: float, exponents: Tensor, shift: int) -> Edges:
    """The sum of ``|w 2^(e_head - degree e_tail - shift)|^p`` of every edge, given e of every class."""
    by_head = exponents[layout.heads]
    by_tail = -layout.degree * exponents[layout.tails]
    highest = int(by_head.max()) if len(by_head) else 0

    at_head, at_tail = power_of_two(by_head - highest), power_of_two(by_tail + highest - shift)
    at_tail = at_tail[None, :, None] if layout.is_matrix else at_tail[:, None, None]
    at_head, at_tail = at_head[:, None, None].to(tensor.device), at_tail.to(tensor.device)
    scales_heads = bool((at_head != 1).any())

    def of_entries(entries: Tensor, heads: Tensor, tails: Tensor) -> Tensor:
        x = entries.double()
        if scales_heads:
            x = x * at_head[heads]
        x = x * (at_tail[:, tails] if layout.is_matrix else at_tail[tails])
        x = x.mul_(x) if p == 2 else x.abs_().pow_(p)
        return (x.sum(2) if x.shape[2] > 1 else x[:, :, 0]).cpu()

    return layout.reduce(tensor, of_entries, largest=False)


@dataclass(frozen=True)
class ClassFactors:
    """The factor of every class, ``mantissa * 2^exponent``: alone it may be out of the range of floats."""

    mantissa: Tensor
    exponent: Tensor

    def power(self, power: int) -> ClassFactors:
        return ClassFactors(self.mantissa**power, power * self.exponent)

    def scale_(self, tensor: Tensor, edge: EdgeClasses) -> None:
        """Multiplies every entry of a parameter, or of what is shaped as one, by ``factor(head) /
        factor(tail)^degree``, in fp64."""
        # Whether it is written at all is the same on all ranks: an optimizer looks for writes.
        ends = edge.head, edge.tail
        if all(bool((self.exponent[ids] == 0).all() & (self.mantissa[ids] == 1).all()) for ids in ends):
            return
        edge, tensor = cut_edges(edge, shards_of(tensor)), local_part(tensor).detach()
        if not tensor.numel():
            tensor.zero_()
            return
        head, tail = self.exponent[edge.head], edge.degree * self.exponent[edge.tail]
        highest = head.max()  # factors may be out of range where their quotients are not
        at_head = self.mantissa[edge.head] * power_of_two(head - highest)
        at_tail = self.mantissa[edge.tail] ** -edge.degree * power_of_two(highest - tail)
        at_head, at_tail = at_head.to(tensor.device), at_tail.to(tensor.device)
        step = (
            max(1, CHUNK * (64 if tensor.is_cuda else 1) // max(1, tensor[0].numel())) if tensor.dim() else 1
        )
        for start in range(0, len(tensor) if tensor.dim() else 1, step):
            part = tensor[start : start + step] if tensor.dim() else tensor
            own = [x[start : start + step] if x.dim() and len(x) > 1 else x for x in (at_head, at_tail)]
            part.copy_((part * own[0]).mul_(own[1]))  # in fp64, as factors are


def power_of_two(exponent: Tensor) -> Tensor:
    exponent = exponent.clamp(-1000, 1000).to(torch.int32)
    return exact_ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent)


def cut_edges(edge: EdgeClasses, shards: tuple[Shard, ...]) -> EdgeClasses:
    """The classes at the ends of the entries that this rank holds."""

    def cut(ids: Tensor) -> Tensor:
        for shard in shards:
            if ids.shape[shard.dim] > 1:
                ids = ids.narrow(shard.dim, shard.start, shard.length)
        return ids

    return EdgeClasses(cut(edge.head), cut(edge.tail), edge.degree) if shards else edge


def _chunks(view: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    step = max(1, CHUNK // max(1, view[0].numel() if len(view) else 1)) * (64 if view.is_cuda else 1)
    yield from zip(view.split(step), rows.split(step), strict=True)


def _as_index(chosen: Tensor) -> Tensor | slice:
    """As a mask, but a view where it chooses all."""
    return slice(None) if bool(chosen.all()) else chosen.nonzero().flatten()


def _places(chosen: Tensor, held: Tensor) -> Tensor:
    """The places in ``chosen`` of those of its entries that are held."""
    return torch.isin(chosen, held).nonzero().flatten()


def _spread(parts: list[Tensor], places: Tensor, size: int) -> Tensor:
    whole = torch.zeros(size, dtype=torch.float64)
    if parts:
        whole[places] = torch.cat(parts).double()
    return whole


def _over_ranks(values: Tensor, groups: tuple[dist.ProcessGroup, ...], largest: bool) -> Tensor:
    for group in groups:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        moved = values.to(device)
        dist.all_reduce(moved, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        values = moved.cpu()
    return values
