"""The equivalent network of least mu_{p,q}, for finite p and q.

With ``t`` the logarithm of the factor of every class, and ``R_r = sum |w|^p exp(p (t_head - t_tail))`` over
the weights into unit r,

    mu_{p,q}^q = sum_r R_r^(q/p)

is convex in t and strictly so over the classes that lie on a walk along weights that are not zero from one
unit that cannot be rescaled to another: there is one minimum. There, for every free class, what grows with
its factor is what shrinks: ``sum over incoming S = sum over outgoing S``, of itself and of all classes that
follow from it, with ``S = R_r^(q/p - 1) |w|^p exp(p (...))``.

Classes that lie on no such walk (before a layer of zeros, behind a dead unit) have no minimum. Their side
that is not zero is brought to the norm of their layer, or to 1, so that all equivalents still become one.

Gains of norms: from the minimum all units behind a norm are moved by one factor, such that the mean size of
their gains is 1 (of a gain of 0, that of the largest other weight into its unit counts). The others are
balanced again around these.

In order, so that networks that differ by powers of two end at the same bits:
1. integer exponents for all classes, such that the largest weight into each is about 1. These depend on
   nothing but binary exponents, so that from here on all such networks are the same;
2. t from sums of powers of the weights so rescaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pathsgd.balancing.class_edges import (
    ClassFactors,
    EdgeLayout,
    Edges,
    Norms,
    cut_rows,
    find_highest,
    find_largest,
    find_largest_into,
    join_edges,
    sum_powers,
)
from pathsgd.balancing.exponents import Learned, find_exponents, find_live
from pathsgd.errors import PathError
from pathsgd.graph.union_find import UnionFind
from pathsgd.graph.unit_classes import FIXED, EdgeClasses
from pathsgd.graph.unit_relations import Relations

LOG_2 = math.log(2)
TOLERANCE = 1e-13
"""Tolerance of ``log(arriving / leaving)``."""
ROUNDED, PATIENCE = 1e-10, 30
"""Below so much it is rounding, if so many rounds do not halve it."""
ROUNDS = 2000
OMEGA = 0.8
MEMORY = 8
FADED = 2.0**-20
"""A unit keeps at least this share of the norm of its layer, so that steps on what leads out of it are
finite."""


@torch.no_grad()
def find_least_mu(
    tensors: Mapping[str, Tensor],
    edges: Mapping[str, EdgeClasses],
    relations: Relations,
    fixed: Tensor,
    p: float,
    q: float,
    rows: Mapping[str, Tensor] | None = None,
    norms: Norms | None = None,
) -> ClassFactors:
    """The factors of all classes that lead to the equivalent of least mu_{p,q}.

    Args:
        tensors: the parameters. With sharded ones this is a collective call.
        edges: by parameter, the classes of its entries.
        relations: of the classes.
        fixed: by class, whether it stays as it is.
        p: the order of the norm over the weights into a unit.
        q: the order of the norm over units.
        rows: if p and q differ, by parameter the units that its entries lead into.
        norms: whose mean gain is to be 1.
    """
    units = rows if rows is not None and p != q else {}
    fixed = relations.hold(fixed)
    named = [
        (name, EdgeLayout(part, ends, fixed, own))
        for name, edge in edges.items()
        for part, ends, own in cut_rows(tensors[name], edge, units.get(name))
    ]
    named = [(name, layout) for name, layout in named if layout.is_changed or units]
    layouts = [layout for _, layout in named]
    largest = [find_largest(layout) for layout in layouts]
    live = find_live(join_edges(largest), relations, fixed)
    layers = _find_layers(layouts, relations)

    def start_from(factors: ClassFactors) -> _Solver:
        found = []
        for layout, sizes in zip(layouts, largest, strict=True):
            shift = find_highest(sizes, factors.exponent)
            powers = sum_powers(layout, p, factors.exponent, shift)
            found.append(_take_logarithms(powers, p * shift * LOG_2))
        solver = _Solver(join_edges(found), relations, fixed, live, layers, p, q, factors.mantissa.log())
        if norms is not None:
            solver.norms = torch.where(solver.live, norms.number, 0)
            gains = [layout for name, layout in named if name in norms.gains]
            solver.gains, others = (
                find_largest_into(some, solver.norms > 0, factors.exponent) for some in (gains, layouts)
            )
            solver.gains = torch.where(solver.gains > -math.inf, solver.gains, others)
        return solver

    exponents = find_exponents(join_edges(largest), relations, fixed)
    solver = start_from(ClassFactors(torch.ones(len(fixed), dtype=torch.float64), exponents))
    if p != 2 and bool(solver.lost.any()):  # squares have the range of fp64, other powers do not
        least_squares = find_least_mu(tensors, edges, relations, fixed, 2, 2, norms=norms)
        solver, exponents = start_from(least_squares), least_squares.exponent
    t = solver.run()
    # Halves are always rounded down, so that a second call changes nothing.
    whole = relations.complete(torch.ceil(t / LOG_2 - 0.5 - 1e-9))
    return ClassFactors((t - whole * LOG_2).exp(), exponents + whole.long())


def _take_logarithms(powers: Edges, scale: float) -> Edges:
    """Values of the list in logarithms; those of matrices as they are, in units of exp(scale)."""
    matrices = [replace(matrix, log_scale=scale) for matrix in powers.matrices]
    return replace(powers, matrices=matrices, values=powers.values.double().log() + scale)


def _find_layers(layouts: list[EdgeLayout], relations: Relations) -> Tensor:
    """The number of each class's layer: units that one parameter leads out of are in one, and those that it
    leads into, but for those in relations. Layer 0 is that of units which cannot be rescaled."""
    node = torch.full((relations.count,), -1)
    together = UnionFind(1)
    node[FIXED] = 0
    kind = relations.related.long() + ~(relations.is_free | (torch.arange(relations.count) == FIXED))
    for layout in layouts:
        heads = layout.head[layout.head != FIXED]
        for classes in (*(heads[kind[heads] == k] for k in range(3)), layout.tail[layout.tail != FIXED]):
            if not len(classes):
                continue
            (own,) = together.grow(1)
            for other in node[classes].unique().tolist():
                if other > 0:
                    together.union(own, other)
            node[classes] = own
    roots = torch.tensor([together.find(k) for k in range(len(together))])
    layers = torch.where(node >= 0, roots[node.clamp(min=0)], 0)
    return layers.unique(return_inverse=True)[1]


def _log_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    """log of the sums of exp(values) that have the same index."""
    top = torch.full((size,), -math.inf, dtype=torch.float64).scatter_reduce(0, index, values, "amax")
    top = torch.where(top > -math.inf, top, 0)
    return torch.zeros_like(top).index_add(0, index, (values - top[index]).exp()).log() + top


# Factors


@dataclass(frozen=True)
class _Flow:
    """The flow into every class and the flow out of it, and mu^q; all in logarithms."""

    arriving: Tensor
    leaving: Tensor
    between: Tensor
    """Sums of S over the edges from one layer to another, for each two layers that are joined."""
    total: float


class _Past:
    """Anderson's extrapolation of the last few rounds."""

    def __init__(self) -> None:
        self.points: list[Tensor] = []
        self.steps: list[Tensor] = []

    def extrapolate(self, t: Tensor, step: Tensor) -> Tensor:
        self.points, self.steps = [*self.points[-MEMORY:], t], [*self.steps[-MEMORY:], step]
        if len(self.points) == 1:
            return t + step
        points = torch.stack(self.points, 1).diff(dim=1)
        steps = torch.stack(self.steps, 1).diff(dim=1)
        weights = torch.linalg.lstsq(steps, step[:, None], driver="gelsd").solution
        return t + step - ((points + steps) @ weights)[:, 0]


class _Solver:
    """Minimises mu_{p,q}.

    A round moves all classes at once, each most of the way to where arriving and leaving would be equal if
    the others stayed. In a deep network this takes long to change the scales of whole layers, so these are
    found beside it by Newton's method on one number for each layer. Both lead downwards: where mu has grown
    nevertheless, half of the last step is taken from where it was least.
    """

    def __init__(
        self,
        edges: Edges,
        relations: Relations,
        fixed: Tensor,
        live: Tensor,
        layers: Tensor,
        p: float,
        q: float,
        start: Tensor,
    ) -> None:
        self.edges, self.relations = edges, relations
        self.layers, self.p, self.q, self.start = layers, p, q, start
        self.count, self.order = len(fixed), max(p, q)
        self.layer_count = int(layers.max()) + 1
        self.moving = layers
        self.norms = self.gains = torch.zeros_like(layers)
        # The edges of the list, then one for every row of a matrix; and one for every column.
        self.heads = torch.cat([edges.heads, *(m.heads for m in edges.matrices)])
        self.tails = torch.cat([edges.tails, *(m.tails for m in edges.matrices)])
        self.units = torch.cat([edges.units, *(m.units for m in edges.matrices)])
        self.no_weight = torch.zeros(int(self.units.max()) + 1 if len(self.units) else 0, dtype=torch.float64)
        self.is_loop = edges.is_loop
        self._join_layers()
        # Powers that underflow say nothing of where the minimum is: such units stay where they are.
        shrinking, growing = self._find_sides(self._measure(start, live | fixed))
        self.lost = live & relations.is_free & (torch.minimum(shrinking, growing) == -math.inf)
        self.live, self.known = live & ~self.lost, fixed | self.lost

    def _join_layers(self) -> None:
        """Numbers the pairs of layers that edges join, with the coefficients of the numbers that move layers:
        one each, or if relations tie these, one for each way in which they can move."""
        matrices = self.edges.matrices
        tails = [layer.expand(len(m.heads)) for m in matrices for layer in [self.moving[m.tails[:1]]]]
        joined = self.moving[self.heads] * self.layer_count + torch.cat(
            [self.moving[self.edges.tails], *tails]
        )
        pairs, self.pair = joined.unique(return_inverse=True)
        layers = torch.eye(self.layer_count, dtype=torch.float64)
        self.moves = self._find_moves()
        self.coefficients = (
            layers[pairs // self.layer_count] - layers[pairs % self.layer_count]
        ) @ self.moves

    def _find_moves(self) -> Tensor:
        """What can be added to the logarithms of all factors of each layer, by columns; one for each of some
        layers, from which the others follow."""
        terms, layers = self.relations.derived, self.moving
        # Sums that are the same for layers have the same value for random numbers: one of each is enough.
        generator = torch.Generator().manual_seed(0)
        numbers = torch.rand(self.layer_count, generator=generator, dtype=torch.float64)
        values = (-numbers[layers]).index_add(0, terms.of, terms.power * numbers[layers[terms.by]])
        unique, number = values[terms.of].unique(return_inverse=True)
        first = torch.zeros(len(unique), dtype=torch.int64).scatter_reduce(0, number, terms.of, "amax")
        sums = -torch.eye(self.layer_count, dtype=torch.float64)[layers[first]]
        used = first[number] == terms.of
        index = number[used], layers[terms.by[used]]
        sums.index_put_(index, terms.power[used].double(), accumulate=True)
        sums[:, FIXED] = 0
        follows: dict[int, int] = {}
        for k, own in enumerate(sums):
            if float(own.abs().max()) > ROUNDED:
                layer = int(own.abs().argmax())
                sums[k] = own / own[layer]
                others = torch.arange(len(sums)) != k
                sums[others] -= sums[others, layer, None] * sums[k]
                follows[layer] = k
        self.free_layers = torch.tensor(
            [k for k in range(1, self.layer_count) if k not in follows], dtype=torch.int64
        )
        moves = torch.eye(self.layer_count, dtype=torch.float64)[:, self.free_layers]
        for layer, k in follows.items():
            moves[layer] = -sums[k, self.free_layers]
        return moves

    def run(self) -> Tensor:
        t = self.start
        if bool(self.live.any()):
            t = self._keep_from_fading(self._minimize(t))
        if bool(self.norms.any()):
            t = self._settle_norms(t)
            t = self._keep_from_fading(self._minimize(t))
        return self._settle_others(t)

    def _settle_norms(self, t: Tensor) -> Tensor:
        """Brings the mean gain of every norm to 1. From here on the factors of its units are known, and those
        of their layers are not moved together."""
        normed = self.norms > 0
        gains = torch.where(normed, self.gains + t, -math.inf)
        count = torch.bincount(self.norms)
        mean = _log_sum(gains, self.norms, len(count)) - count.double().log()
        self.live, self.known = self.live & ~normed, self.known | normed
        self.moving = torch.where(torch.isin(self.layers, self.layers[normed]), FIXED, self.layers)
        self._join_layers()
        return torch.where(normed, t - mean[self.norms], t)

    def _minimize(self, t: Tensor) -> Tensor:
        active = self.live | self.known
        t = t + self._equalize_layers(self._measure(t, active))
        least, best, step, past = math.inf, t, t, _Past()
        smallest, idle = math.inf, 0
        for _ in range(ROUNDS):
            flow = self._measure(t, active)
            if flow.total > least + 1e-12:  # too far
                step, past = step / 2, _Past()
                t = best + step
                continue
            shrinking, growing = self._find_sides(flow)
            gap = torch.where(self.live & self.relations.is_free, shrinking - growing, 0)
            size = float(gap.abs().max())
            smallest, idle = (size, 0) if size < smallest / 2 else (smallest, idle + 1)
            rounding = 1e-15 * self.order * float(t.abs().max())
            if size <= TOLERANCE + rounding or (size <= ROUNDED and idle >= PATIENCE):
                return t
            least, best = min(least, flow.total), t
            step = self.relations.complete(OMEGA * gap / (self.order * (1 + self.relations.rate)))
            weight = torch.where(self.live, torch.logaddexp(shrinking, growing), -math.inf)
            corrected = self._correct_layers(step, flow, weight)
            if float(((weight - weight.max()).exp() * (gap / 2).tanh()) @ corrected) > 0:  # downwards
                step = corrected
            t = past.extrapolate(t, step)
        raise PathError(f"balance did not converge: weights into and out of units still differ by {size:.1e}")

    def _find_sides(self, flow: _Flow) -> tuple[Tensor, Tensor]:
        """log of what shrinks with the factor of a free class, and of what grows with it."""
        terms = self.relations.derived
        if not len(terms.of):
            return flow.leaving, flow.arriving
        index, power = torch.cat([torch.arange(self.count), terms.by]), terms.power.abs().double()

        def add_up(same: Tensor, other: Tensor) -> Tensor:
            others = torch.where(terms.power > 0, same[terms.of], other[terms.of]) + power.log()
            return _log_sum(torch.cat([same, others]), index, self.count)

        return add_up(flow.leaving, flow.arriving), add_up(flow.arriving, flow.leaving)

    def _measure(self, t: Tensor, active: Tensor) -> _Flow:
        edges, p = self.edges, self.p
        at_head = torch.where(active, p * t, -math.inf)
        at_tail = torch.where(active, -p * t, -math.inf)
        rows = [m.sum_rows(at_tail[m.tails]) + at_head[m.heads] for m in edges.matrices]
        single = edges.values + at_head[edges.heads] + at_tail[edges.tails]
        values, weight = torch.cat([single, *rows]), self.no_weight
        if self.p != self.q:
            sums = _log_sum(values, self.units, len(weight))
            total = float((self.q / p * sums).logsumexp(0))
            weight = torch.where(sums.isfinite(), (self.q / p - 1) * sums, 0)
            values = values + weight[self.units]
            values[: len(single)].masked_fill_(self.is_loop, -math.inf)
        columns = [
            m.sum_columns(at_head[m.heads] + weight[m.units]) + at_tail[m.tails] for m in edges.matrices
        ]
        leaving = torch.cat([values[: len(single)], *columns])
        between = _log_sum(values, self.pair, len(self.coefficients))
        return _Flow(
            _log_sum(values, self.heads, self.count),
            _log_sum(leaving, self.tails, self.count),
            between,
            total if self.p != self.q else float(between.logsumexp(0)),
        )

    # Layers

    def _equalize_layers(self, flow: _Flow) -> Tensor:
        """What brings all layers to about the same norm, by class: a start within the range of floats."""
        live = flow.between > -math.inf
        ones = torch.ones(int(live.sum()), 1, dtype=torch.float64)
        matrix = torch.cat([self.order * self.coefficients[live], -ones], 1)
        ridge = 1e-6 * torch.eye(matrix.shape[1], dtype=torch.float64)
        solution = torch.linalg.solve(matrix.T @ matrix + ridge, matrix.T @ -flow.between[live])
        return (self.moves @ solution[:-1])[self.moving]

    def _correct_layers(self, step: Tensor, flow: _Flow, weight: Tensor) -> Tensor:
        """A step in which the mean of each layer is replaced by what Newton's method finds."""
        if not len(self.free_layers):
            return step
        share = (weight - _log_sum(weight, self.moving, self.layer_count)[self.moving]).exp()
        share = torch.where(self.live, share, 0)
        mean = torch.zeros(self.layer_count, dtype=torch.float64).index_add(0, self.moving, share * step)
        powers = (flow.between - flow.between.max()).exp()
        gradient = self.coefficients.T @ powers
        hessian = self.order * (self.coefficients.T * powers) @ self.coefficients
        # Layers may differ by any power of ten: a diagonal of ones keeps the smallest in the solution.
        scale = hessian.diagonal().clamp(min=1e-300).rsqrt()
        scaled = hessian * scale * scale[:, None] + 1e-14 * torch.eye(len(scale), dtype=torch.float64)
        newton_step = -scale * torch.linalg.solve(scaled, scale * gradient)
        newton_step = newton_step / max(1.0, float(newton_step.abs().max()))
        change = self.moves @ (newton_step - mean[self.free_layers])
        change = torch.where(self.live & self.relations.is_free, change[self.moving], 0)
        return step + self.relations.complete(change)

    # Classes without a minimum

    def _keep_from_fading(self, t: Tensor) -> Tensor:
        flow = self._measure(t, self.live | self.known)
        norm = flow.arriving / self.q
        least = self._mean_norm(norm) + math.log(FADED)
        has_norm = self.live & (norm > -math.inf)
        return self.relations.complete(torch.where(has_norm, t + (least - norm).clamp(min=0), t))

    def _mean_norm(self, norm: Tensor) -> Tensor:
        """log of the mean norm of the live classes of every class's layer, without those of norm 0; 0 if it
        has none."""
        counts = (self.live | (self.norms > 0)) & (norm > -math.inf)
        total = _log_sum(torch.where(counts, norm, -math.inf), self.layers, self.layer_count)
        number = torch.zeros_like(total).index_add(0, self.layers, counts.double())
        return torch.where(number > 0, total - number.log(), 0)[self.layers]

    def _settle_others(self, t: Tensor) -> Tensor:
        """Brings the side that is not zero of every other class to the mean norm of its layer, or to 1, in
        the order in which walks reach them."""
        learned = Learned(self.relations, self.live | self.known, t)
        if bool(learned.known.all()):
            return t
        flow = self._measure(t, learned.known)
        arriving, leaving = (self._mean_norm(log / self.q) for log in (flow.arriving, flow.leaving))
        joined = None
        while not bool(learned.known.all()):
            into, out = self._measure_from(learned.values, learned.known)
            is_reached, wanted = into > -math.inf, arriving - into / self.p
            if learned.settle(is_reached, wanted):
                continue
            is_reached, wanted = out > -math.inf, out / self.p - leaving
            if learned.settle(is_reached, wanted):
                continue
            if joined is None:
                among = self._measure(learned.values, ~learned.known)
                joined = (among.arriving > -math.inf) | (among.leaving > -math.inf)
            learned.choose(joined)
        return learned.values

    def _measure_from(self, t: Tensor, settled: Tensor) -> tuple[Tensor, Tensor]:
        """log of the sums of powers of weights from settled classes, and to them, for classes that are not
        settled, with factors of 1."""
        at_head = torch.where(settled, self.p * t, -math.inf)
        at_tail = torch.where(settled, -self.p * t, -math.inf)
        edges = self.edges
        into = [edges.values + at_tail[edges.tails]]
        into += [m.sum_rows(at_tail[m.tails]) for m in edges.matrices]
        out = [edges.values + at_head[edges.heads]]
        out += [m.sum_columns(at_head[m.heads]) for m in edges.matrices]
        logs = (
            _log_sum(torch.cat(into), self.heads, self.count),
            _log_sum(torch.cat(out), self.tails, self.count),
        )
        into_class, out_class = (torch.where(settled, -math.inf, log) for log in logs)
        return into_class, out_class
