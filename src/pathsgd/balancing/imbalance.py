"""Measures how far a network, and every unit of it, is from its balanced equivalent.

Balancing (:func:`pathsgd.balance`) multiplies the weights into unit v by a factor s_v and divides those out
of it. The imbalance of v is ``-log2 s_v``: the network is its balanced equivalent with every unit rescaled by
``2^imbalance``. The norm of a unit's incoming weights would not do in its place: it also changes with the
factors of the units these weights come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pathsgd.balancing.balance import check_orders, find_balancing_factors, find_norms, find_rows, measure_mu
from pathsgd.balancing.class_edges import add_shifts
from pathsgd.balancing.group_norm import measure_unit_norms
from pathsgd.balancing.lemma1 import solve_balance
from pathsgd.balancing.rescale import name_factors
from pathsgd.errors import PathError
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example, trace
from pathsgd.graph.unit_classes import FIXED, UnitClasses, unit_classes_of
from pathsgd.graph.unit_groups import Group, find_unit_groups


@dataclass(frozen=True)
class Spread:
    """The range of a number over units, with the median."""

    smallest: float
    median: float
    largest: float

    @staticmethod
    def of(values: Tensor) -> Spread | None:
        if not values.numel():
            return None
        lower, upper = values.median(), -(-values).median()  # torch's is the lower of two in the middle
        return Spread(float(values.min()), float((lower + upper) / 2), float(values.max()))


@dataclass(frozen=True)
class LayerImbalance:
    """The units that the same modules lead into."""

    owners: tuple[str, ...]
    """As :func:`pathsgd.rescale` names them; several where their outputs are added up."""
    region: int | None
    units: int
    rescalable: int
    norm: Spread | None
    """Norms of the incoming weights, over units: mu_{p,inf} is the largest of these."""
    imbalance: Spread | None
    """log2, over the units that can be rescaled; None if there are none."""


@dataclass(frozen=True)
class Imbalance:
    """The result of :func:`pathsgd.imbalance`.

    Attributes:
        p: the order of the norms over the weights into a unit.
        q: the order of the norm over units.
        mu: ``mu_{p,q}`` of the network as :func:`pathsgd.balance` counts it; for ``q = math.inf`` the largest
            norm of the weights into a unit.
        mu_balanced: that of the network that :func:`pathsgd.balance` makes.
        layers: the same unit by unit, summed up for every layer.
        factors: what turns the network into its balanced equivalent, for :func:`pathsgd.rescale`.

    Example:
        >>> found = imbalance(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        >>> found.ratio >= 1, [layer.owners for layer in found.layers]
        (True, [('0',), ('2',)])
    """

    p: float
    q: float
    mu: float
    mu_balanced: float
    layers: tuple[LayerImbalance, ...]
    factors: dict[str, Tensor] = field(repr=False)

    @property
    def ratio(self) -> float | None:
        """``mu / mu_balanced``: 1 for a balanced network; less, if at all, where gains of norms are small.
        None where no weight lies on a path."""
        return self.mu / self.mu_balanced if self.mu_balanced > 0 else None


@torch.no_grad()
def imbalance(
    model: nn.Module, example_input: Example | PathGraph | None = None, p: float = 2, q: float = 2
) -> Imbalance:
    """Measures how far ``model`` is from its balanced equivalent; nothing is changed.

    Args:
        model: the module to measure.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        p: as in :func:`pathsgd.balance`.
        q: as in :func:`pathsgd.balance`.

    Returns:
        An :class:`Imbalance`: norms, their balanced values, and the factors that balance the model.

    Raises:
        TraceError: the model cannot be traced.
        PathError: p or q is invalid, a tensor is not finite, or the graph is of another model.

    Example:
        >>> import pathsgd
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> _ = model[0].weight.data.fill_(8.0), model[2].weight.data.fill_(0.5)
        >>> found = imbalance(model)
        >>> found.mu**2, found.mu_balanced**2, found.layers[0].imbalance.largest
        (64.25, 8.0, 2.0)
        >>> pathsgd.rescale(model, None, found.factors)
        >>> model[0].weight.item(), model[2].weight.item()
        (2.0, 2.0)
    """
    check_orders(p, q)
    graph = trace(model, example_input)
    tensors = graph.tensors(model)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise PathError(f"{name!r} holds nan or inf; only finite weights can be measured")
    units = unit_classes_of(graph)
    norms = measure_unit_norms(graph, tensors, p).cpu().double()
    if math.isinf(q):
        mu_balanced, log_factors = solve_balance(graph, tensors, units, float(p))
        mu, octaves = float(norms.max()) if norms.numel() else 0.0, log_factors / math.log(2)
    else:
        mu, mu_balanced, octaves, _ = compare_with_balanced(graph, tensors, p, q)
    # Units in a product could be rescaled, but for q = inf balancing leaves them as they are.
    related = units.relations.related
    kept = related if math.isinf(q) else torch.zeros_like(related)
    layers = _layers(graph, units, norms, -octaves, kept)
    return Imbalance(p, q, mu, mu_balanced, layers, name_factors(units, octaves.exp2()))


def compare_with_balanced(
    graph: PathGraph, tensors: Mapping[str, Tensor], p: float, q: float
) -> tuple[float, float, Tensor, dict[str, Tensor]]:
    """``mu_{p,q}`` of a network and of its balanced equivalent, log2 of the factors that lead there, and its
    tensors."""
    units, rows = unit_classes_of(graph), None if p == q else find_rows(graph)
    acting = add_shifts({name: tensors[name] for name in units.parameters}, units.shifts)
    factors = find_balancing_factors(acting, units, p, q, rows, norms=find_norms(graph))
    balanced = {name: tensor.detach().clone() for name, tensor in acting.items()}
    for name, tensor in balanced.items():
        factors.scale_(tensor, units.parameters[name])
    mu, least = (measure_mu(each, p, q, rows) for each in (acting, balanced))
    for name, shift in units.shifts.items():
        balanced[name] -= shift
    octaves = factors.mantissa.log2() + factors.exponent
    return mu, least, octaves, {**tensors, **balanced}


def _layers(
    graph: PathGraph, units: UnitClasses, norms: Tensor, imbalances: Tensor, kept: Tensor
) -> tuple[LayerImbalance, ...]:
    """The groups of units in order of evaluation; those with the same owners are one layer, as the parts of
    an attention's input projection are."""
    numbers = {region: k for k, region in enumerate(graph.parameter_regions())}
    by_owners: dict[tuple[tuple[str, ...], int | None], list[tuple[Tensor, Tensor]]] = {}
    start = 0
    for group in find_unit_groups(graph):
        heads = group.heads(units)
        values = norms[start : start + len(heads)]
        start += len(heads)
        region = numbers.get(graph.regions[group.parts[0].node])
        by_owners.setdefault((_owners(group, units), region), []).append((heads, values))
    layers = []
    for (owners, region), groups in by_owners.items():
        heads, values = (torch.cat(parts) for parts in zip(*groups, strict=True))
        free = (heads != FIXED) & ~kept[heads]
        spread = Spread.of(imbalances[heads[free]])
        layers.append(LayerImbalance(owners, region, len(heads), int(free.sum()), Spread.of(values), spread))
    return tuple(layers)


def _owners(group: Group, units: UnitClasses) -> tuple[str, ...]:
    names = []
    for part in group.parts:
        parameter = part.operation.weight.parameter
        assert parameter is not None
        module = parameter.name.rpartition(".")[0]
        names.append(module if module and module in units.owners else parameter.name)
    return tuple(dict.fromkeys(names))
