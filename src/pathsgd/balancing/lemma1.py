"""Solves the inequalities of :mod:`pathsgd.balancing.balance`.

For one M the least ``a`` comes out of a forward pass over the classes of units. Where ties make classes
depend on each other in a circle (a residual stream, a recurrence) the pass becomes a system of equations,
solved by policy iteration: pick the largest inequality of each class, solve, repeat. The least feasible M is
the root of a decreasing function of one variable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import torch
from torch import Tensor

from pathsgd.graph.edge_weights import Tensors
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.union_find import UnionFind
from pathsgd.graph.unit_classes import FIXED, UnitClasses
from pathsgd.graph.unit_groups import find_unit_groups


@torch.no_grad()
def solve_balance(graph: PathGraph, tensors: Tensors, units: UnitClasses, p: float) -> tuple[float, Tensor]:
    """The least ``mu_{p,inf}`` of all equivalents, and log s of every class in one that reaches it."""
    order = 1.0 if math.isinf(p) else p
    unchanged = torch.zeros(units.count, dtype=torch.float64)
    system = _System(graph, tensors, units, p)
    if not system.groups:
        return 0.0, unchanged
    largest = system.largest_sum()
    # The network as it is satisfies the inequalities of its own mu; beside it rounding decides.
    feasible = 1 + (math.log(largest) / order if largest > 0 else 0.0)
    log_bound = _find_root(lambda x: system.excess(-order * x), feasible, 600 / order)
    if log_bound is None:
        return largest ** (1 / order), unchanged
    powers = system.solve(-order * log_bound)
    assert powers is not None
    return math.exp(log_bound), torch.where(powers > 0, -powers.log() / order, 0.0)


def _find_root(excess: Callable[[float], float], high: float, reach: float) -> float | None:
    """The root of a decreasing function that is +inf where M is infeasible, from its feasible side, on which
    ``high`` lies: bisection, with secant steps where both ends are finite. None if the function is negative
    all the way down: no live path reaches a unit that cannot be rescaled."""
    f_high, step = excess(high), 2.0
    while (f_low := excess(low := high - step)) <= 0:
        if step > reach:
            return None
        high, f_high, step = low, f_low, 2 * step
    for turn in range(200):
        middle = (low + high) / 2
        if turn % 3 and math.isfinite(f_low) and math.isfinite(f_high):
            # Twice out of three the secant, once a little inside it: else one end never moves.
            inside = 1e-3 * (high - low) if turn % 3 == 1 else 0.0
            middle = high - f_high * (high - low) / (f_high - f_low) + inside
        if not low < middle < high:
            middle = (low + high) / 2
        if not low < middle < high or f_high == 0:
            break
        value = excess(middle)
        if value > 0:
            low, f_low = middle, value
        else:
            high, f_high = middle, value
    return high


@dataclass
class _GroupPowers:
    """``|w|^p`` of the weights into a group of units, with the classes at both ends."""

    heads: Tensor
    parts: list[tuple[Tensor, Tensor]]
    """(powers, classes they come from), by unit and incoming weight."""

    def sums(self, powers: Tensor, infinite: bool) -> Tensor:
        """``sum_u |w_uv|^p a_u`` (or the maximum) of every unit."""
        totals = []
        for weights, tails in self.parts:
            if len(tails) == 1 and not infinite:
                totals.append(weights @ powers[tails[0]])
            else:
                products = weights * powers[tails]
                totals.append(products.amax(1) if infinite else products.sum(1))
        stacked = torch.stack(totals)
        return stacked.amax(0) if infinite else stacked.sum(0)

    def matrix(self, number: Tensor, size: int) -> Tensor:
        """The coefficients of the classes numbered by ``number`` (-1 for others)."""
        matrix = torch.zeros(len(self.heads), size + 1, dtype=torch.float64)
        for weights, tails in self.parts:
            columns = number[tails].expand(weights.shape)
            matrix.scatter_add_(1, torch.where(columns < 0, size, columns), weights)
        return matrix[:, :size]


class _System:
    """The inequalities of a network, in an order in which they can be solved."""

    def __init__(self, graph: PathGraph, tensors: Tensors, units: UnitClasses, p: float) -> None:
        self.infinite, self.count = math.isinf(p), units.count
        self.held = units.relations.related
        self.held[FIXED] = True
        self.groups = []
        for group in find_unit_groups(graph):
            rows = [part.rows(tensors, torch.float64).abs().cpu() for part in group.parts]
            weights = rows if self.infinite else [row.pow(p) for row in rows]
            tails = [part.tails(units) for part in group.parts]
            self.groups.append(_GroupPowers(group.heads(units), list(zip(weights, tails, strict=True))))
        self.fixed = [group for group in self.groups if bool(self.held[group.heads].any())]
        """The groups with units that cannot be rescaled."""
        self.components = _order_components(self.groups, self.held)

    def largest_sum(self) -> float:
        """``mu^p`` of the network as it is."""
        ones = torch.ones(self.count, dtype=torch.float64)
        return max(float(group.sums(ones, self.infinite).max()) for group in self.groups)

    def excess(self, log_damping: float) -> float:
        """log of the worst inequality of a unit that cannot be rescaled; +inf if M is infeasible."""
        powers = self.solve(log_damping)
        if powers is None:
            return math.inf
        worst = 0.0
        for group in self.fixed:
            sums = group.sums(powers, self.infinite)
            worst = max(worst, float(sums[self.held[group.heads]].max()))
        return math.log(worst) + log_damping if worst > 0 else -math.inf

    def solve(self, log_damping: float) -> Tensor | None:
        """The least ``a`` for one M, with ``log_damping = log M^-p``; None if there is none."""
        damping = math.exp(min(log_damping, 709.0))
        powers = self.held.to(torch.float64)
        for groups, classes, circular in self.components:
            if not circular:
                self._sweep_once(groups, powers, damping)
            elif not self._solve_circle(groups, classes, powers, damping):
                return None
        return powers if bool(torch.isfinite(powers).all()) else None

    def _sweep_once(self, groups: list[_GroupPowers], powers: Tensor, damping: float) -> None:
        updates = powers.clone()
        for group in groups:
            sums = damping * group.sums(powers, self.infinite)
            updates.scatter_reduce_(0, group.heads, sums, "amax")
        powers.copy_(torch.where(self.held, powers, updates))

    def _solve_circle(
        self, groups: list[_GroupPowers], classes: Tensor, powers: Tensor, damping: float
    ) -> bool:
        if self.infinite:
            return self._sweep_until_stable(groups, classes, powers, damping)
        number = torch.full((self.count,), -1)
        number[classes] = torch.arange(len(classes))
        rows = torch.cat([group.matrix(number, len(classes)) for group in groups])
        known = torch.cat([group.sums(powers, False) for group in groups])
        heads = number[torch.cat([group.heads for group in groups])]
        rows, known, heads = rows[heads >= 0], known[heads >= 0], heads[heads >= 0]
        current = torch.zeros(len(classes), dtype=torch.float64)
        policy: Tensor | None = None
        for _ in range(200):
            values = damping * (rows @ current + known)
            chosen = _pick_largest_rows(values, heads, len(classes), policy)
            if policy is not None and torch.equal(chosen, policy):
                break
            policy = chosen
            present = policy >= 0
            pick = policy.clamp(min=0)
            matrix = torch.where(present[:, None], rows[pick], 0.0)
            constant = torch.where(present, known[pick], 0.0)
            identity = torch.eye(len(classes), dtype=torch.float64)
            solution, info = torch.linalg.solve_ex(identity - damping * matrix, damping * constant)
            if int(info) or not bool(torch.isfinite(solution).all()):
                return False
            # The least solution grows with every better policy. One that falls (below zero, say) means a gain
            # over 1 around a circle: there is no solution.
            if bool((solution < current * (1 - 1e-9)).any()):
                return False
            current = solution
        powers[classes] = current
        return True

    def _sweep_until_stable(
        self, groups: list[_GroupPowers], classes: Tensor, powers: Tensor, damping: float
    ) -> bool:
        """p = inf: longest paths, which have settled after as many rounds as there are classes."""
        for _ in range(len(classes) + 1):
            before = powers[classes].clone()
            self._sweep_once(groups, powers, damping)
            if torch.equal(powers[classes], before):
                return True
        return False


def _pick_largest_rows(values: Tensor, heads: Tensor, size: int, policy: Tensor | None) -> Tensor:
    """For every class the row of largest value; the current one unless another is really larger."""
    best = torch.full((size,), -math.inf, dtype=torch.float64)
    best.scatter_reduce_(0, heads, values, "amax")
    chosen = torch.full((size,), -1)
    attained = values >= best[heads]
    chosen[heads[attained]] = attained.nonzero().flatten()
    if policy is not None:
        kept = (policy >= 0) & (values[policy.clamp(min=0)] >= best * (1 - 1e-13))
        chosen = torch.where(kept, policy, chosen)
    return chosen


def _order_components(
    groups: list[_GroupPowers], held: Tensor
) -> list[tuple[list[_GroupPowers], Tensor, bool]]:
    """(groups that have to be solved together, their classes, whether they depend on themselves), after those
    they depend on."""
    free = [torch.unique(f.heads[~held[f.heads]]) for f in groups]
    owner = torch.full((len(held),), -1)
    together = UnionFind(len(groups))
    for k, classes in enumerate(free):
        # A class takes the largest of all inequalities into it, so these go together.
        for other in _owners(owner, classes):
            together.union(k, other)
        owner[classes] = k
    sources = [_owners(owner, torch.cat([tails.flatten() for _, tails in f.parts])) for f in groups]
    while True:
        members: dict[int, list[int]] = {}
        for k in range(len(groups)):
            if len(free[k]):
                members.setdefault(together.find(k), []).append(k)
        feeding = {root: {together.find(s) for k in ks for s in sources[k]} for root, ks in members.items()}
        try:
            order = list(TopologicalSorter({r: feeds - {r} for r, feeds in feeding.items()}).static_order())
            break
        except CycleError as circle:
            first, *others = circle.args[1]
            for other in others:
                together.union(first, other)
    return [
        (
            [groups[k] for k in members[r]],
            torch.cat([free[k] for k in members[r]]).unique(),
            r in feeding[r],
        )
        for r in order
    ]


def _owners(owner: Tensor, classes: Tensor) -> list[int]:
    return [k for k in torch.unique(owner[classes]).tolist() if k >= 0]
