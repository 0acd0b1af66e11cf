"""Solves the inequalities of :mod:`pathsgd.geometry.balance`.

For one M the least ``a`` comes out of a forward pass over the classes of units. Where ties make classes
depend on each other in a circle (a residual stream, a recurrence) the pass becomes a system of equations,
solved by policy iteration: pick the largest inequality of each class, solve, repeat. The least feasible M is
the root of a decreasing function of one variable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.unit_groups import unit_groups
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.union_find import UnionFind
from pathsgd.graph.unit_classes import FIXED, UnitClasses


@torch.no_grad()
def solve_balance(graph: PathGraph, tensors: Tensors, units: UnitClasses, p: float) -> tuple[float, Tensor]:
    """The least ``mu_{p,inf}`` of all equivalents, and log s of every class in one that reaches it."""
    order = 1.0 if math.isinf(p) else p
    unchanged = torch.zeros(units.count, dtype=torch.float64)
    system = _System.of(graph, tensors, units, p)
    if not system.families:
        return 0.0, unchanged
    largest = system.largest_sum()
    start = math.log(largest) / order if largest > 0 else 0.0
    log_bound = _find_root(lambda x: system.excess(-order * x), start, 600 / order)
    if log_bound is None:
        return largest ** (1 / order), unchanged
    powers = system.solve(-order * log_bound)
    assert powers is not None
    return math.exp(log_bound), torch.where(powers > 0, -powers.log() / order, 0.0)


def _find_root(excess: Callable[[float], float], start: float, reach: float) -> float | None:
    """The root of a decreasing function that is +inf where M is infeasible, from its feasible side:
    bisection, with secant steps where both ends are finite. None if the function is negative all the way
    down: no live path reaches a unit that cannot be rescaled."""
    low, high = _bracket(excess, start, reach)
    if low is None:
        return None
    f_low, f_high = excess(low), excess(high)
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


def _bracket(excess: Callable[[float], float], start: float, reach: float) -> tuple[float | None, float]:
    """An infeasible and a feasible point around ``start``."""
    step = 1.0
    if excess(start) > 0:
        low = start
        while excess(low + step) > 0:
            low, step = low + step, 2 * step
        return low, low + step
    high = start
    while excess(high - step) <= 0:
        if step > reach:
            return None, high
        high, step = high - step, 2 * step
    return high - step, high


@dataclass
class _Family:
    """``sum over incoming weights`` for a family of units: matrices and the classes they come from."""

    heads: Tensor
    parts: list[tuple[Tensor, Tensor]]

    def sums(self, powers: Tensor, infinite: bool) -> Tensor:
        """``sum_u |w_uv|^p a_u`` (or the maximum) of every unit."""
        totals = []
        for weights, tails in self.parts:
            products = weights * powers[tails] if infinite or len(tails) > 1 else None
            if products is None:
                totals.append(weights @ powers[tails[0]])
            else:
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


@dataclass
class _System:
    """The inequalities of a network, in an order in which they can be solved."""

    families: list[_Family]
    components: list[tuple[list[_Family], Tensor, bool]]
    """(families, their classes, whether they depend on themselves), earlier ones first."""
    fixed: list[_Family]
    """The families with units that cannot be rescaled."""
    count: int
    held: Tensor
    infinite: bool

    @staticmethod
    def of(graph: PathGraph, tensors: Tensors, units: UnitClasses, p: float) -> _System:
        infinite = math.isinf(p)
        held = units.squared.clone()
        held[FIXED] = True
        families = []
        for group in unit_groups(graph):
            heads = group.heads(units)
            parts = []
            for part in group.parts:
                rows = part.rows(tensors, torch.float64).abs().cpu()
                weights = rows if infinite else rows.pow(p)
                parts.append((weights, part.tails(units)))
            families.append(_Family(heads, parts))
        fixed = [family for family in families if bool(held[family.heads].any())]
        return _System(families, _order_components(families, held), fixed, units.count, held, infinite)

    def largest_sum(self) -> float:
        """``mu^p`` of the network as it is."""
        ones = torch.ones(self.count, dtype=torch.float64)
        return max(float(family.sums(ones, self.infinite).max()) for family in self.families)

    def excess(self, log_damping: float) -> float:
        """log of the worst inequality of a unit that cannot be rescaled; +inf if M is infeasible."""
        powers = self.solve(log_damping)
        if powers is None:
            return math.inf
        worst = 0.0
        for family in self.fixed:
            sums = family.sums(powers, self.infinite)
            worst = max(worst, float(sums[self.held[family.heads]].max()))
        return math.log(worst) + log_damping if worst > 0 else -math.inf

    def solve(self, log_damping: float) -> Tensor | None:
        """The least ``a`` for one M, with ``log_damping = log M^-p``; None if there is none."""
        damping = math.exp(min(log_damping, 709.0))
        powers = self.held.to(torch.float64)
        for families, classes, circular in self.components:
            if not circular:
                self._sweep_once(families, powers, damping)
            elif not self._solve_circle(families, classes, powers, damping):
                return None
        return powers if bool(torch.isfinite(powers).all()) else None

    def _sweep_once(self, families: list[_Family], powers: Tensor, damping: float) -> None:
        updates = powers.clone()
        for family in families:
            sums = damping * family.sums(powers, self.infinite)
            updates.scatter_reduce_(0, family.heads, sums, "amax")
        powers.copy_(torch.where(self.held, powers, updates))

    def _solve_circle(self, families: list[_Family], classes: Tensor, powers: Tensor, damping: float) -> bool:
        if self.infinite:
            return self._sweep_until_stable(families, classes, powers, damping)
        number = torch.full((self.count,), -1)
        number[classes] = torch.arange(len(classes))
        rows = torch.cat([family.matrix(number, len(classes)) for family in families])
        known = torch.cat([family.sums(powers, False) for family in families])
        heads = number[torch.cat([family.heads for family in families])]
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
        self, families: list[_Family], classes: Tensor, powers: Tensor, damping: float
    ) -> bool:
        """p = inf: longest paths, which have settled after as many rounds as there are classes."""
        for _ in range(len(classes) + 1):
            before = powers[classes].clone()
            self._sweep_once(families, powers, damping)
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


def _order_components(families: list[_Family], held: Tensor) -> list[tuple[list[_Family], Tensor, bool]]:
    """Families that share or feed each other's classes, as strongly connected components in order."""
    free = [torch.unique(f.heads[~held[f.heads]]) for f in families]
    needs = [torch.unique(torch.cat([tails.flatten() for _, tails in f.parts])) for f in families]
    # A class takes the largest of all inequalities into it, so its families are solved together.
    owner = torch.full((len(held),), -1)
    merged = UnionFind(len(families))
    for k, classes in enumerate(free):
        for other in torch.unique(owner[classes]).tolist():
            if other >= 0:
                merged.union(k, other)
        owner[classes] = k
    members: dict[int, list[int]] = {}
    for k in range(len(families)):
        if len(free[k]):
            members.setdefault(merged.find(k), []).append(k)
    after: dict[int, set[int]] = {r: set() for r in members}
    for r, ks in members.items():
        for k in ks:
            sources = owner[needs[k][~held[needs[k]]]]
            after[r].update(merged.find(s) for s in torch.unique(sources[sources >= 0]).tolist())
    ordered = []
    for component in _find_strong_components(after):
        inside = [k for r in component for k in members[r]]
        classes = torch.unique(torch.cat([free[k] for k in inside]))
        circular = len(component) > 1 or component[0] in after[component[0]]
        ordered.append(([families[k] for k in inside], classes, circular))
    return ordered


def _find_strong_components(after: dict[int, set[int]]) -> list[list[int]]:
    """Tarjan's algorithm without recursion; a component comes after those it depends on."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[list[int]] = []
    for start in after:
        if start in index:
            continue
        work = [(start, iter(after[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    work.append((other, iter(after[other])))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    found.append(stack[cut:])
                    del stack[cut:]
    return found
