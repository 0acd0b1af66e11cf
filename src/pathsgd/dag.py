"""The paper's own object: a network as units, edges and weights on any directed acyclic graph.

Every quantity is computed as it is defined, by listing every path; gamma is computed a second time
by Algorithm 1, line by line. Slow, obvious, complete: start reading here, and test against it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Generic, TypeAlias, TypeVar

Unit = TypeVar("Unit", bound=Hashable)
Path: TypeAlias = tuple[tuple[Unit, Unit], ...]


@dataclass(frozen=True, eq=False)
class Dag(Generic[Unit]):
    """A network of ReLU units on a directed acyclic graph, skip connections included.

    A bias is an edge from a constant unit. Two parallel edges need a unit in between. A Dag never changes:
    ``rescale`` and ``path_sgd_step`` return a new one.

    Args:
        weights: ``{(u, v): w}``, one entry for each edge u -> v.
        inputs: the input units. They have no incoming edge.
        outputs: the output units. They have no activation and, as in the paper, no outgoing edge.
        constants: units that are always 1. Paths start at them as they do at the inputs.
        fixed: edges that are not parameters (identities, pooling): they lie on paths but not in mu.
        linear: hidden units without activation.
        max_paths: more paths than this are not listed.

    Raises:
        ValueError: the graph is not as described above, or an argument of a method is invalid.

    Example:
        >>> dag = Dag(
        ...     weights={("x", "h"): 3.0, ("h", "y"): 2.0, ("x", "y"): -1.0, ("one", "h"): 0.5},
        ...     inputs=["x"],
        ...     outputs=["y"],
        ...     constants=["one"],
        ... )
        >>> dag.forward({"x": 1.0})  # 2 * relu(3 * 1 + 0.5) - 1 * 1
        {'y': 6.0}
        >>> dag.phi(1)  # the paths weigh |3 * 2|, |-1| and |0.5 * 2|
        8.0
        >>> dag.gamma(2)["h", "y"] == dag.gamma_algorithm1(2)["h", "y"] == 3.0**2 + 0.5**2
        True
        >>> dag.rescale("h", 4.0).forward({"x": 1.0})
        {'y': 6.0}
    """

    weights: Mapping[tuple[Unit, Unit], float]
    inputs: Sequence[Unit]
    outputs: Sequence[Unit]
    constants: Sequence[Unit] = ()
    fixed: Collection[tuple[Unit, Unit]] = ()
    linear: Collection[Unit] = ()
    max_paths: int = 100_000

    def __post_init__(self) -> None:
        own_copies = {
            "weights": {edge: float(weight) for edge, weight in self.weights.items()},
            "inputs": tuple(self.inputs),
            "outputs": tuple(self.outputs),
            "constants": tuple(self.constants),
            "fixed": frozenset(self.fixed),
            "linear": frozenset(self.linear),
        }
        for name, value in own_copies.items():
            object.__setattr__(self, name, value)
        for unit, roles in Counter((*self.inputs, *self.constants, *self.outputs)).items():
            if roles > 1:
                raise ValueError(
                    f"Unit {unit!r} is listed {roles} times among inputs, constants and outputs: "
                    "give each unit one role"
                )
        for unit in self.units:
            if unit in self._sources and self._tails[unit]:
                raise ValueError(
                    f"Unit {unit!r} is an input or constant, but {_names(self._tails[unit])} "
                    "feed it: remove these edges, or make it hidden"
                )
            if unit not in self._sources and not self._tails[unit]:
                raise ValueError(
                    f"Unit {unit!r} has no incoming edge: list it in inputs or constants, or give "
                    "it an edge of weight 0"
                )
            if unit in self._sinks and self._heads[unit]:
                raise ValueError(
                    f"Unit {unit!r} is an output, but feeds {_names(self._heads[unit])}: make it "
                    "hidden and join it to an output of its own by a fixed edge of weight 1"
                )
        for edge in self.fixed:
            if edge not in self.weights:
                raise ValueError(f"Unknown edge {edge!r} in fixed: give it a weight")
        for unit in self.linear:
            self._check_known(unit)

    def _check_known(self, unit: Unit) -> None:
        if unit not in self._tails:
            raise ValueError(f"Unknown unit {unit!r}: the units are {_names(self.units)}")

    @cached_property
    def _sources(self) -> frozenset[Unit]:
        return frozenset((*self.inputs, *self.constants))

    @cached_property
    def _sinks(self) -> frozenset[Unit]:
        return frozenset(self.outputs)

    @cached_property
    def _tails(self) -> dict[Unit, list[Unit]]:
        """For each unit v the units u with an edge u -> v."""
        named = (*self.inputs, *self.constants, *self.outputs)
        tails: dict[Unit, list[Unit]] = {unit: [] for unit in named}
        for u, v in self.weights:
            tails.setdefault(u, [])
            tails.setdefault(v, []).append(u)
        return tails

    @cached_property
    def _heads(self) -> dict[Unit, list[Unit]]:
        """For each unit u the units v with an edge u -> v."""
        heads: dict[Unit, list[Unit]] = {unit: [] for unit in self._tails}
        for u, v in self.weights:
            heads[u].append(v)
        return heads

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Every unit, each one after all that feed it."""
        try:
            return tuple(TopologicalSorter(self._tails).static_order())
        except CycleError as error:
            cycle = " -> ".join(map(repr, error.args[1]))
            raise ValueError(
                f"The edges form a cycle: {cycle}. Remove one, or unroll the recurrence in time"
            ) from None

    @cached_property
    def _trainable(self) -> list[tuple[Unit, Unit]]:
        return [edge for edge in self.weights if edge not in self.fixed]

    def forward(self, x: Mapping[Unit, float]) -> dict[Unit, float]:
        """``f_{G,w,relu}(x)``.

        Args:
            x: the value of each input.

        Returns:
            The value of each output.

        Raises:
            ValueError: x has a value too many or too few.
        """
        values = self._values(x)
        return {unit: values[unit] for unit in self.outputs}

    def _values(self, x: Mapping[Unit, float]) -> dict[Unit, float]:
        _check_keys("x", x, self.inputs)
        values = {**dict.fromkeys(self.constants, 1.0), **x}
        for v in self.units:
            if v not in values:
                value = math.fsum(values[u] * self.weights[u, v] for u in self._tails[v])
                values[v] = value if v in self.linear or v in self._sinks else max(0.0, value)
        return values

    def gradient(
        self, x: Mapping[Unit, float], output_gradient: Mapping[Unit, float]
    ) -> dict[tuple[Unit, Unit], float]:
        """``dL/dw_e`` at one example.

        Args:
            x: the value of each input.
            output_gradient: ``dL/df`` of each output.

        Returns:
            The derivative for every edge that is not fixed.

        Raises:
            ValueError: a value is missing or belongs to no unit.
        """
        _check_keys("output_gradient", output_gradient, self.outputs)
        values = self._values(x)
        deltas = dict(output_gradient)  # dL / d(the sum that a unit receives)
        for u in reversed(self.units):
            if u not in deltas:
                delta = math.fsum(self.weights[u, v] * deltas[v] for v in self._heads[u])
                deltas[u] = delta if u in self.linear or values[u] > 0 else 0.0
        return {(u, v): values[u] * deltas[v] for u, v in self._trainable}

    @cached_property
    def _paths_onward(self) -> dict[Unit, int]:
        """For each unit the number of paths from it to an output."""
        count = dict.fromkeys(self.outputs, 1)
        for u in reversed(self.units):
            if u not in count:
                count[u] = sum(count[v] for v in self._heads[u])
        return count

    @property
    def path_count(self) -> int:
        """The number of paths, counted without listing them."""
        return sum(self._paths_onward[unit] for unit in self._sources)

    def paths(self) -> Iterator[Path[Unit]]:
        """Every path from an input or constant to an output.

        Returns:
            Tuples of edges.

        Raises:
            ValueError: there are more than ``max_paths``.
        """
        if self.path_count > self.max_paths:
            raise ValueError(
                f"{self.path_count} paths are too many to list (max_paths = {self.max_paths}): "
                "use gamma_algorithm1, which lists none, or raise max_paths"
            )
        return self._walk()

    def _walk(self) -> Iterator[Path[Unit]]:
        begun: list[tuple[Path[Unit], Unit]] = [((), unit) for unit in (*self.inputs, *self.constants)]
        while begun:
            path, u = begun.pop()
            if u in self._sinks:
                yield path
            for v in self._heads[u]:
                if self._paths_onward[v]:
                    begun.append(((*path, (u, v)), v))

    def path_vector(self) -> dict[Path[Unit], float]:
        """``pi(w)``: for every path the product of its weights."""
        return {path: math.prod(self.weights[edge] for edge in path) for path in self.paths()}

    def phi(self, p: float) -> float:
        """``phi_p(w) = ||pi(w)||_p``, the path norm.

        Args:
            p: the order of the norm, from 1 to ``math.inf``; the latter takes the heaviest path.

        Returns:
            The norm.

        Raises:
            ValueError: p is below 1, or there are too many paths to list.
        """
        return _norm(self.path_vector().values(), p)

    def phi_per_output(self, p: float) -> dict[Unit, float]:
        """``phi_{p,j}(w)``: the path norm over the paths that end at output j."""
        ending: dict[Unit, list[float]] = {unit: [] for unit in self.outputs}
        for path, product in self.path_vector().items():
            ending[path[-1][1]].append(product)
        return {unit: _norm(products, p) for unit, products in ending.items()}

    def gamma(self, p: float) -> dict[tuple[Unit, Unit], float]:
        """``gamma_p(w, e) = (sum_{paths through e} prod_{e_k != e} |w_{e_k}|^p)^(2/p)``.

        That is the squared l_p norm of the paths through e with e itself left out.

        Args:
            p: the order of the norm, from 1 to ``math.inf``.

        Returns:
            gamma of every edge.

        Raises:
            ValueError: p is below 1, or there are too many paths to list.
        """
        root = 2 / _power(p)
        return {edge: _power_sum(rests, p) ** root for edge, rests in self._products_without.items()}

    @cached_property
    def _products_without(self) -> dict[tuple[Unit, Unit], list[float]]:
        """For each edge e the ``prod_{e_k != e} w_{e_k}`` of every path through e."""
        products: dict[tuple[Unit, Unit], list[float]] = {edge: [] for edge in self.weights}
        for path in self.paths():
            weights = [self.weights[edge] for edge in path]
            for k, edge in enumerate(path):
                # Not the whole product / w_e: w_e may be 0.
                products[edge].append(math.prod(weights[:k]) * math.prod(weights[k + 1 :]))
        return products

    def gamma_in(self, p: float) -> dict[Unit, float]:
        """Algorithm 1, lines 1 and 4: ``gamma_in(v) = sum_{u -> v} gamma_in(u) |w_uv|^p``.

        It is 1 at inputs and constants. For p = inf read max for the sum and |w| for |w|^p.
        """
        gamma_in, power = dict.fromkeys(self._sources, 1.0), _power(p)
        for v in self.units:
            if v not in gamma_in:
                terms = (gamma_in[u] * abs(self.weights[u, v]) ** power for u in self._tails[v])
                gamma_in[v] = _sum_or_max(terms, p)
        return gamma_in

    def gamma_out(self, p: float) -> dict[Unit, float]:
        """Algorithm 1, lines 2 and 5: ``gamma_out(u) = sum_{u -> v} |w_uv|^p gamma_out(v)``.

        It is 1 at outputs. For p = inf read max for the sum and |w| for |w|^p.
        """
        gamma_out, power = dict.fromkeys(self.outputs, 1.0), _power(p)
        for u in reversed(self.units):
            if u not in gamma_out:
                terms = (abs(self.weights[u, v]) ** power * gamma_out[v] for v in self._heads[u])
                gamma_out[u] = _sum_or_max(terms, p)
        return gamma_out

    def gamma_algorithm1(self, p: float) -> dict[tuple[Unit, Unit], float]:
        """Algorithm 1, line 7: ``gamma(u -> v) = gamma_in(u)^(2/p) gamma_out(v)^(2/p)``.

        Args:
            p: the order of the norm, from 1 to ``math.inf``.

        Returns:
            gamma of every edge.

        Raises:
            ValueError: p is below 1.
        """
        gamma_in, gamma_out, root = self.gamma_in(p), self.gamma_out(p), 2 / _power(p)
        return {(u, v): gamma_in[u] ** root * gamma_out[v] ** root for u, v in self.weights}

    def path_sgd_step(self, gradient: Mapping[tuple[Unit, Unit], float], lr: float, p: float) -> Dag[Unit]:
        """Algorithm 1, line 8: ``w_e - lr / gamma(w, e) * dL/dw_e``.

        Fixed edges stay, and so do edges of gamma 0: no path counts them, so their gradient is 0.

        Args:
            gradient: ``dL/dw_e`` for every edge that is not fixed.
            lr: the learning rate.
            p: the order of the norm, from 1 to ``math.inf``.

        Returns:
            The network after the step.

        Raises:
            ValueError: p is below 1, or a gradient is missing or belongs to no edge.
        """
        _check_keys("gradient", gradient, self._trainable)
        gamma, weights = self.gamma_algorithm1(p), dict(self.weights)
        for edge in self._trainable:
            if gamma[edge] > 0:
                weights[edge] -= lr / gamma[edge] * gradient[edge]
        return replace(self, weights=weights)

    def mu(self, p: float, q: float) -> float:
        """``mu_{p,q}(w) = (sum_v (sum_{u -> v} |w_uv|^p)^(q/p))^(1/q)`` over edges that are not fixed.

        Args:
            p: the order of the norm over the weights into a unit.
            q: the order of the norm over units.

        Returns:
            The norm.

        Raises:
            ValueError: p or q is below 1.
        """
        into: dict[Unit, list[float]] = {unit: [] for unit in self.units}
        for u, v in self._trainable:
            into[v].append(self.weights[u, v])
        return _norm((_norm(weights, p) for weights in into.values()), q)

    def rescale(self, unit: Unit, c: float) -> Dag[Unit]:
        """``rho_{c,v}(w)``: edges into the hidden unit v times c, edges out of it divided by c.

        Args:
            unit: the unit v.
            c: the factor, over 0 and finite.

        Returns:
            The rescaled network, which computes the same function.

        Raises:
            ValueError: v is no hidden unit or has a fixed edge, or c is invalid.
        """
        self._check_known(unit)
        if unit in self._sources or unit in self._sinks:
            raise ValueError(f"Cannot rescale {unit!r}, an input, constant or output: choose a hidden unit")
        if not 0 < c < math.inf:
            raise ValueError(f"Invalid factor for unit {unit!r}: {c} (expected 0 < c < inf)")
        weights = dict(self.weights)
        for edge in weights:
            if unit in edge and edge in self.fixed:
                raise ValueError(
                    f"Cannot rescale {unit!r}, its edge {edge!r} is fixed: choose another unit, or "
                    "take the edge out of fixed"
                )
            if edge[1] == unit:
                weights[edge] *= c
            elif edge[0] == unit:
                weights[edge] /= c
        return replace(self, weights=weights)


def _power(p: float) -> float:
    if not p >= 1:
        raise ValueError(f"Invalid exponent: {p} (expected 1 <= p <= inf)")
    return 1.0 if p == math.inf else p


def _sum_or_max(terms: Iterable[float], p: float) -> float:
    return max(terms, default=0.0) if p == math.inf else math.fsum(terms)


def _power_sum(values: Iterable[float], p: float) -> float:
    """``sum |value|^p``; for p = inf ``max |value|``."""
    power = _power(p)
    return _sum_or_max((abs(value) ** power for value in values), p)


def _norm(values: Iterable[float], p: float) -> float:
    norm: float = _power_sum(values, p) ** (1 / _power(p))
    return norm


def _check_keys(what: str, given: Iterable[Hashable], expected: Iterable[Hashable]) -> None:
    if unknown := set(given) - set(expected):
        raise ValueError(f"Unknown {_names(unknown)} in {what}: expected {_names(expected)}")
    if missing := set(expected) - set(given):
        raise ValueError(f"Missing {_names(missing)} in {what}: give it a value")


def _names(units: Iterable[Hashable]) -> str:
    names = sorted(map(repr, units))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
