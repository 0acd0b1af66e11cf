"""How the edge weights of a graph are computed: found once, whatever their values are.

Weights with one number per channel, those of norms and biases, are many and small: a call of torch for each
takes longer than its work. Those that are products alike are laid one after the other and computed together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pathsgd.graph.image_convolutions import is_image_convolution
from pathsgd.graph.nodes import Linear, Multiply, Reshape, Shape, Source, Stored, Weight
from pathsgd.graph.path_graph import PathGraph


class Column(NamedTuple):
    """Tensors that are laid one after the other."""

    names: tuple[str, ...]
    inverse_sigma: float | None
    """As in :class:`pathsgd.graph.nodes.Stored`."""


class Vectors(NamedTuple):
    """Weights of one number per channel that are products alike, laid one after the other."""

    nodes: tuple[int, ...]
    columns: tuple[Column, ...]
    """What is multiplied: factors, and last the parameter if there is one."""
    factors: tuple[Column, ...]
    sizes: list[int]
    shape: Shape
    """That of all of them together."""


class WeightPlan(NamedTuple):
    """The weights of a graph."""

    weights: dict[int, Weight]
    powered: frozenset[int]
    """The nodes whose powers are kept: all but linear layers."""
    vectors: dict[tuple[int, ...], Vectors]
    """By their nodes."""
    vectors_of: dict[int, Vectors]
    """By each of their nodes."""
    others: tuple[int, ...]
    """What is powered and no vector."""
    convolutions: frozenset[int]
    """Whose powers need not be kept on a GPU: those of one image, not too large. Our kernels square their
    weights."""


def plan_weights(graph: PathGraph) -> WeightPlan:
    """The plan of a graph that passes run over."""
    weights = dict(graph.weights())
    powered = frozenset(k for k in weights if not isinstance(graph.nodes[k].operation, Linear))
    alike: dict[object, list[int]] = {}
    for k in sorted(powered):
        if isinstance(graph.nodes[k].operation, (Multiply, Source)) and _is_vector(weights[k]):
            alike.setdefault(_kind_of(weights[k]), []).append(k)
    vectors = {tuple(nodes): _lay_out(nodes, weights) for nodes in alike.values() if len(nodes) > 1}
    vectors_of = {k: each for nodes, each in vectors.items() for k in nodes}
    others = tuple(sorted(powered.difference(vectors_of)))
    convolutions = frozenset(k for k in others if is_image_convolution(graph, k))
    return WeightPlan(weights, powered, vectors, vectors_of, others, convolutions)


def keep_factors(weight: Weight) -> tuple[Stored, ...]:
    """The factors, without those whose powers are one, if anything is left then."""
    kept = tuple(stored for stored in weight.factors if stored.literal not in ((1.0,), (-1.0,)))
    return kept if kept or weight.parameter is not None else weight.factors


def stored_in(weight: Weight) -> tuple[Stored, ...]:
    """What a weight is the product of, but for signs: factors, and last its parameter if it has one."""
    own = () if weight.parameter is None else (weight.parameter,)
    return (*keep_factors(weight), *own)


def _is_vector(weight: Weight) -> bool:
    """Whether it is channels, and axes of size one behind, and so is all it is made of, in the same order."""
    return weight.shape[:1] == (math.prod(weight.shape),) and all(
        stored.shape == weight.shape
        and not (stored.literal or stored.inverse)
        and all(isinstance(view, Reshape) for view in stored.views)
        for stored in stored_in(weight)
    )


def _kind_of(weight: Weight) -> tuple[object, ...]:
    sigmas = tuple(stored.inverse_sigma for stored in stored_in(weight))
    return len(weight.shape), weight.parameter is None, sigmas


def _lay_out(nodes: list[int], weights: dict[int, Weight]) -> Vectors:
    own = [weights[k] for k in nodes]
    columns = tuple(map(_column, zip(*map(stored_in, own), strict=True)))
    factors = columns if own[0].parameter is None else columns[:-1]
    sizes = [weight.shape[0] for weight in own]
    return Vectors(tuple(nodes), columns, factors, sizes, (sum(sizes), *own[0].shape[1:]))


def _column(stored: Sequence[Stored]) -> Column:
    return Column(tuple(each.name for each in stored), stored[0].inverse_sigma)
