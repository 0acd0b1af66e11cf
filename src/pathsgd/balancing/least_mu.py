"""The equivalent network of least mu_{p,q}, for finite p and q.

With ``t`` the logarithm of the factor of every class, ``R_r = sum |w|^p exp(p (t_head - d t_tail))`` over the
weights into unit r, and d the degree of the weight (2 behind a square),

    mu_{p,q}^q = sum_r R_r^(q/p)

is convex in t and strictly so over the classes that lie on a walk along weights that are not zero from one
unit that cannot be rescaled to another: there is one minimum. There, for every class, what arrives is what
leaves: ``sum over incoming S = sum over outgoing d S``, with ``S = R_r^(q/p - 1) |w|^p exp(p (...))``.

Classes that lie on no such walk (before a layer of zeros, behind a dead unit) have no minimum. Their side
that is not zero is brought to the norm of their layer, or to 1, so that all equivalents still become one.

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
    ZERO,
    ClassFactors,
    EdgeLayout,
    Edges,
    find_largest,
    join_edges,
    sum_powers,
)
from pathsgd.errors import PathError
from pathsgd.graph.union_find import UnionFind
from pathsgd.graph.unit_classes import FIXED, EdgeClasses

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
    fixed: Tensor,
    p: float,
    q: float,
    rows: Mapping[str, Tensor] | None = None,
) -> ClassFactors:
    """The factors of all classes that lead to the equivalent of least mu_{p,q}.

    Args:
        tensors: the parameters. With sharded ones this is a collective call.
        edges: by parameter, the classes of its entries.
        fixed: by class, whether it stays as it is.
        p: the order of the norm over the weights into a unit.
        q: the order of the norm over units.
        rows: if p and q differ, by parameter the units that its entries lead into.
    """
    units = rows if rows is not None and p != q else {}
    layouts = [EdgeLayout(name, edge, fixed, units.get(name), tensors[name]) for name, edge in edges.items()]
    layouts = [layout for layout in layouts if layout.is_changed or units]
    largest = [find_largest(layout, tensors[layout.name]) for layout in layouts]
    exponents, from_fixed = _find_exponents(join_edges(largest), fixed)
    found = []
    for layout, sizes in zip(layouts, largest, strict=True):
        shift = _highest(sizes, exponents)
        powers = sum_powers(layout, tensors[layout.name], p, exponents, shift)
        found.append(_take_logarithms(powers, p * shift * LOG_2))
    layers = _find_layers(layouts, len(fixed))
    t = _Solver(join_edges(found), fixed, from_fixed, layers, p, q).run()
    # Halves are always rounded down, so that a second call changes nothing.
    whole = torch.ceil(t / LOG_2 - 0.5 - 1e-9)
    return ClassFactors((t - whole * LOG_2).exp(), exponents + whole.long())


# Exponents


def _find_exponents(largest: Edges, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """An exponent for every class, from the binary exponents of the largest weight of every edge; and which
    classes a walk from a unit that cannot be rescaled leads to.

    In the order in which walks reach them, each class takes what brings its largest weight from a known one
    to 1; then those that lead to known ones; then one is chosen of those that are joined to none of these.
    """
    exponents, known = torch.zeros(len(fixed), dtype=torch.int64), fixed.clone()
    reached: Tensor | None = None
    while True:
        while _reach_heads(largest, exponents, known):
            pass
        if reached is None:
            reached = known.clone()
        if _reach_tails(largest, exponents, known):
            continue
        if bool(known.all()):
            return exponents, reached
        known |= _choose(~known, _find_joined(largest, len(fixed)))


def _reach_heads(edges: Edges, exponents: Tensor, known: Tensor) -> bool:
    progress = False
    for matrix in edges.matrices:
        new, old = ~known[matrix.heads], known[matrix.tails]
        if bool(new.any()) and bool(old.any()):
            at_tail = torch.where(old, -matrix.degree * exponents[matrix.tails], ZERO)
            largest = matrix.find_largest(at_tail)
            progress |= _learn(exponents, known, matrix.heads, torch.where(new, largest, ZERO), -1)
    if not progress:
        usable = ~known[edges.heads] & known[edges.tails]
        largest = torch.where(usable, edges.values - edges.degrees * exponents[edges.tails], ZERO)
        progress = _learn(exponents, known, edges.heads, largest, -1)
    return progress


def _reach_tails(edges: Edges, exponents: Tensor, known: Tensor) -> bool:
    for matrix in edges.matrices:
        new, old = ~known[matrix.tails], known[matrix.heads]
        if bool(new.any()) and bool(old.any()):
            at_head = torch.where(old, exponents[matrix.heads], ZERO)
            largest = matrix.find_largest_by_tail(at_head)
            if _learn(exponents, known, matrix.tails, torch.where(new, largest, ZERO), matrix.degree):
                return True
    usable = ~known[edges.tails] & known[edges.heads]
    for degree in edges.degrees.unique().tolist():
        chosen = usable & (edges.degrees == degree)
        largest = torch.where(chosen, edges.values + exponents[edges.heads], ZERO)
        if _learn(exponents, known, edges.tails, largest, degree):
            return True
    return False


def _find_joined(edges: Edges, count: int) -> Tensor:
    """Whether a weight that is not zero leads into a class or out of it, by class."""
    used = edges.values > ZERO // 2
    classes = [edges.heads[used], edges.tails[used]]
    for matrix in edges.matrices:
        classes.append(matrix.heads[matrix.find_largest(torch.zeros_like(matrix.tails)) > ZERO // 2])
        classes.append(matrix.tails[matrix.find_largest_by_tail(torch.zeros_like(matrix.heads)) > ZERO // 2])
    joined = torch.zeros(count, dtype=torch.bool)
    joined[torch.cat(classes)] = True
    return joined


def _choose(left: Tensor, joined: Tensor) -> Tensor:
    """The classes that are left and have no weights; if there are none, the first that is left."""
    alone = left & ~joined
    return alone if bool(alone.any()) else torch.arange(len(left)) == left.nonzero()[0]


def _learn(exponents: Tensor, known: Tensor, classes: Tensor, found: Tensor, degree: int) -> bool:
    """Sets ``exponent = found / degree``, rounded down, of classes for which anything was found."""
    best = torch.full_like(exponents, ZERO).scatter_reduce(0, classes, found, "amax")
    new = (best > ZERO // 2) & ~known
    exponents[new] = torch.div(best[new], degree, rounding_mode="floor")
    known |= new
    return bool(new.any())


def _highest(sizes: Edges, exponents: Tensor) -> int:
    """The largest binary exponent of a parameter's rescaled entries."""
    highest = [ZERO]
    for matrix in sizes.matrices:
        at_head, at_tail = exponents[matrix.heads], -matrix.degree * exponents[matrix.tails]
        highest.append(int((matrix.find_largest(at_tail) + at_head).max()))
    if len(sizes.values):
        listed = sizes.values + exponents[sizes.heads] - sizes.degrees * exponents[sizes.tails]
        highest.append(int(listed.max()))
    return max(highest) if max(highest) > ZERO // 2 else 0


def _take_logarithms(powers: Edges, scale: float) -> Edges:
    """Values of the list in logarithms; those of matrices as they are, in units of exp(scale)."""
    matrices = [replace(matrix, log_scale=scale) for matrix in powers.matrices]
    return replace(powers, matrices=matrices, values=powers.values.double().log() + scale)


def _find_layers(layouts: list[EdgeLayout], count: int) -> Tensor:
    """The number of each class's layer: units that one parameter leads into, or out of, are in one. Layer 0
    is that of units which cannot be rescaled."""
    node = torch.full((count,), -1)
    together = UnionFind(1)
    node[FIXED] = 0
    for layout in layouts:
        for classes in (layout.head, layout.tail):
            free = classes[classes != FIXED].unique()
            if not len(free):
                continue
            (own,) = together.grow(1)
            for other in node[free].unique().tolist():
                if other > 0:
                    together.union(own, other)
            node[free] = own
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
        self, edges: Edges, fixed: Tensor, from_fixed: Tensor, layers: Tensor, p: float, q: float
    ) -> None:
        self.edges, self.fixed, self.layers, self.p, self.q = edges, fixed, layers, p, q
        self.count, self.order = len(fixed), max(p, q)
        self.layer_count = int(layers.max()) + 1
        # The edges of the list, then one for every row of a matrix; and one for every column.
        self.heads = torch.cat([edges.heads, *(m.heads for m in edges.matrices)])
        self.tails = torch.cat([edges.tails, *(m.tails for m in edges.matrices)])
        self.units = torch.cat([edges.units, *(m.units for m in edges.matrices)])
        self.no_weight = torch.zeros(int(self.units.max()) + 1 if len(self.units) else 0, dtype=torch.float64)
        self.is_loop = edges.is_loop
        self.degree = torch.ones(self.count, dtype=torch.float64)
        degrees = torch.cat([edges.degrees, *(torch.full_like(m.tails, m.degree) for m in edges.matrices)])
        self.degree.scatter_reduce_(0, self.tails, degrees.double(), "amax")
        self._join_layers()
        self.live = from_fixed & self._find_walks_to_fixed() & ~fixed

    def _join_layers(self) -> None:
        """Numbers the pairs of layers that edges join, with the coefficients of both layers' factors."""
        matrices = self.edges.matrices
        tails = [layer.expand(len(m.heads)) for m in matrices for layer in [self.layers[m.tails[:1]]]]
        tail = torch.cat([self.layers[self.edges.tails], *tails])
        degree = torch.cat([self.edges.degrees, *(torch.full_like(m.heads, m.degree) for m in matrices)])
        most = self.layer_count, int(degree.max()) + 1 if len(degree) else 1
        joined = (self.layers[self.heads] * most[0] + tail) * most[1] + degree
        pairs, self.pair = joined.unique(return_inverse=True)
        numbers = torch.arange(len(pairs))
        coefficients = torch.zeros(len(pairs), self.layer_count, dtype=torch.float64)
        coefficients[numbers, pairs // most[1] // most[0]] += 1
        coefficients[numbers, pairs // most[1] % most[0]] -= (pairs % most[1]).double()
        self.coefficients = coefficients[:, 1:]

    def run(self) -> Tensor:
        t = torch.zeros(self.count, dtype=torch.float64)
        if bool(self.live.any()):
            t = self._minimize(t)
            t = self._keep_from_fading(t)
        return self._settle_others(t)

    def _minimize(self, t: Tensor) -> Tensor:
        active = self.live | self.fixed
        t = t + self._equalize_layers(self._measure(t, active))[self.layers]
        least, best, step, past = math.inf, t, t, _Past()
        smallest, idle = math.inf, 0
        for _ in range(ROUNDS):
            flow = self._measure(t, active)
            if flow.total > least + 1e-12:  # too far
                step, past = step / 2, _Past()
                t = best + step
                continue
            gap = torch.where(self.live, flow.leaving - flow.arriving, 0)
            size = float(gap.abs().max())
            smallest, idle = (size, 0) if size < smallest / 2 else (smallest, idle + 1)
            rounding = 1e-15 * self.order * float(t.abs().max())
            if size <= TOLERANCE + rounding or (size <= ROUNDED and idle >= PATIENCE):
                return t
            least, best = min(least, flow.total), t
            step = self._correct_layers(OMEGA * gap / (self.order * (1 + self.degree)), flow)
            t = past.extrapolate(t, step)
        raise PathError(f"balance did not converge: arriving and leaving weights still differ by {size:.1e}")

    def _measure(self, t: Tensor, active: Tensor) -> _Flow:
        edges, p = self.edges, self.p
        at_head = torch.where(active, p * t, -math.inf)
        at_tail = torch.where(active, -p * t, -math.inf)
        rows = [m.sum_rows(m.degree * at_tail[m.tails]) + at_head[m.heads] for m in edges.matrices]
        single = edges.values + at_head[edges.heads] + edges.degrees * at_tail[edges.tails]
        values, weight = torch.cat([single, *rows]), self.no_weight
        if self.p != self.q:
            sums = _log_sum(values, self.units, len(weight))
            total = float((self.q / p * sums).logsumexp(0))
            weight = torch.where(sums.isfinite(), (self.q / p - 1) * sums, 0)
            values = values + weight[self.units]
            values[: len(single)].masked_fill_(self.is_loop, -math.inf)
        columns = [
            m.sum_columns(at_head[m.heads] + weight[m.units])
            + m.degree * at_tail[m.tails]
            + math.log(m.degree)
            for m in edges.matrices
        ]
        leaving = torch.cat([values[: len(single)] + edges.degrees.double().log(), *columns])
        between = _log_sum(values, self.pair, len(self.coefficients))
        return _Flow(
            _log_sum(values, self.heads, self.count),
            _log_sum(leaving, self.tails, self.count),
            between,
            total if self.p != self.q else float(between.logsumexp(0)),
        )

    # Layers

    def _equalize_layers(self, flow: _Flow) -> Tensor:
        """Factors of layers with which all have about the same norm: a start within the range of floats."""
        live = flow.between > -math.inf
        ones = torch.ones(int(live.sum()), 1, dtype=torch.float64)
        matrix = torch.cat([self.order * self.coefficients[live], -ones], 1)
        ridge = 1e-6 * torch.eye(self.layer_count, dtype=torch.float64)
        solution = torch.linalg.solve(matrix.T @ matrix + ridge, matrix.T @ -flow.between[live])
        return torch.cat([solution.new_zeros(1), solution[:-1]])

    def _correct_layers(self, step: Tensor, flow: _Flow) -> Tensor:
        """A step in which the mean of each layer is replaced by what Newton's method finds."""
        weight = torch.where(self.live, torch.logaddexp(flow.arriving, flow.leaving), -math.inf)
        share = (weight - _log_sum(weight, self.layers, self.layer_count)[self.layers]).exp()
        share = torch.where(self.live, share, 0)
        mean = torch.zeros(self.layer_count, dtype=torch.float64).index_add(0, self.layers, share * step)
        powers = (flow.between - flow.between.max()).exp()
        gradient = self.coefficients.T @ powers
        hessian = self.order * (self.coefficients.T * powers) @ self.coefficients
        # Layers may differ by any power of ten: a diagonal of ones keeps the smallest in the solution.
        scale = hessian.diagonal().clamp(min=1e-300).rsqrt()
        scaled = hessian * scale * scale[:, None] + 1e-14 * torch.eye(len(scale), dtype=torch.float64)
        newton_step = -scale * torch.linalg.solve(scaled, scale * gradient)
        newton_step = newton_step / max(1.0, float(newton_step.abs().max()))
        change = torch.cat([newton_step.new_zeros(1), newton_step]) - mean
        return step + torch.where(self.live, change[self.layers], 0)

    # Classes without a minimum

    def _find_walks_to_fixed(self) -> Tensor:
        """Whether a walk leads from a class to a unit that cannot be rescaled, by class."""
        reached = self.fixed.clone()
        while True:
            before = reached.clone()
            usable = reached[self.edges.heads] & (self.edges.values > -math.inf)
            reached[self.edges.tails[usable]] = True
            for matrix in reversed(self.edges.matrices):
                log = torch.where(reached, 0.0, -math.inf).double()
                if not bool(reached[matrix.tails].all()):
                    leads = matrix.sum_columns(log[matrix.heads]) > -math.inf
                    reached[matrix.tails[leads]] = True
            if torch.equal(before, reached):
                return reached

    def _keep_from_fading(self, t: Tensor) -> Tensor:
        flow = self._measure(t, self.live | self.fixed)
        norm = flow.arriving / self.q
        least = self._mean_norm(norm) + math.log(FADED)
        return torch.where(self.live, t + (least - norm).clamp(min=0), t)

    def _mean_norm(self, norm: Tensor) -> Tensor:
        """log of the mean norm of the live classes of every class's layer; 0 if it has none."""
        total = _log_sum(torch.where(self.live, norm, -math.inf), self.layers, self.layer_count)
        number = torch.zeros_like(total).index_add(0, self.layers, self.live.double())
        return torch.where(number > 0, total - number.log(), 0)[self.layers]

    def _settle_others(self, t: Tensor) -> Tensor:
        """Brings the side that is not zero of every other class to the mean norm of its layer, or to 1, in
        the order in which walks reach them."""
        settled = self.live | self.fixed
        if bool(settled.all()):
            return t
        flow = self._measure(t, settled)
        arriving, leaving = (self._mean_norm(log / self.q) for log in (flow.arriving, flow.leaving))
        while not bool(settled.all()):
            into, out = self._measure_from(t, settled)
            if bool((into > -math.inf).any()):
                new, change = into > -math.inf, arriving - into / self.p
            elif bool((out > -math.inf).any()):
                new, change = out > -math.inf, (out / self.p - leaving) / self.degree
            else:
                among = self._measure(t, ~settled)
                joined = (among.arriving > -math.inf) | (among.leaving > -math.inf)
                new, change = _choose(~settled, joined), torch.zeros_like(t)
            t = torch.where(new, change, t)
            settled = settled | new
        return t

    def _measure_from(self, t: Tensor, settled: Tensor) -> tuple[Tensor, Tensor]:
        """log of the sums of powers of weights from settled classes, and to them, for classes that are not
        settled, with factors of 1."""
        at_head = torch.where(settled, self.p * t, -math.inf)
        at_tail = torch.where(settled, -self.p * t, -math.inf)
        edges = self.edges
        into = [edges.values + edges.degrees * at_tail[edges.tails]]
        into += [m.sum_rows(m.degree * at_tail[m.tails]) for m in edges.matrices]
        out = [edges.values + at_head[edges.heads]]
        out += [m.sum_columns(at_head[m.heads]) for m in edges.matrices]
        logs = (
            _log_sum(torch.cat(into), self.heads, self.count),
            _log_sum(torch.cat(out), self.tails, self.count),
        )
        into_class, out_class = (torch.where(settled, -math.inf, log) for log in logs)
        return into_class, out_class
