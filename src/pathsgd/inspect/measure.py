"""phi_p, mu_{p,inf} and how far every unit is from balance.

Balancing multiplies unit v by a scale s_v on the way in and divides by it on the way out.
The imbalance of v is

    imbalance(v) = -log2 s_v

so the network is its balanced equivalent with every unit rescaled by ``2^imbalance``: a unit of a balanced
network that is rescaled by 2^5 has imbalance 5. The norm of a unit's incoming weights would not do in its
place: it also changes with the scales of the units these weights come from. The scales are those that
:func:`pathsgd.balance` applies; they come out of its system of inequalities, so nothing is copied or changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pathsgd.errors import PathError
from pathsgd.geometry.balance_solver import solve_balance
from pathsgd.geometry.gamma import check_p
from pathsgd.geometry.norms import path_norm, unit_norms
from pathsgd.geometry.unit_groups import Group, unit_groups
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.unit_classes import FIXED, UnitClasses, unit_classes_of


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
class Layer:
    """The units that the same modules lead into."""

    owners: tuple[str, ...]
    """As :func:`pathsgd.rescale` names them; several where their outputs are added up."""
    region: int | None
    units: int
    rescalable: int
    norm: Spread | None
    """Of the incoming weights, over units: what mu_{p,inf} is the largest of."""
    imbalance: Spread | None
    """Over the units that can be rescaled; None if there are none."""


@dataclass(frozen=True)
class Measures:
    """What there is to say about the size of a network's weights."""

    p: float
    log_phi: dict[int, float]
    """By region; the natural logarithm."""
    mu: float
    mu_balanced: float
    layers: list[Layer]
    scales: Tensor
    """What :func:`pathsgd.balance` multiplies each class of units by."""

    @property
    def ratio(self) -> float | None:
        """How far the network is from balance: 1 at best. None where no weight lies on a path."""
        return self.mu / self.mu_balanced if self.mu_balanced > 0 else None


@torch.no_grad()
def measure(model: nn.Module, graph: PathGraph, p: float, region: int | None = None) -> Measures:
    """All of it, or with ``region`` phi and the layers of one region. mu is always of the whole network."""
    check_p(p)
    tensors = graph.tensors(model)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise PathError(f"{name!r} holds nan or inf; only finite weights can be measured")
    asked = range(len(graph.parameter_regions())) if region is None else [region]
    log_phi = {k: float(path_norm(model, graph, p, log=True, region=k)) for k in asked}
    units = unit_classes_of(graph)
    mu_balanced, log_factors = solve_balance(graph, tensors, units, p)
    imbalance = log_factors / -math.log(2)
    norms = unit_norms(graph, tensors, p).cpu().double()
    layers = [
        layer for layer in _layers(graph, units, norms, imbalance) if region is None or layer.region == region
    ]
    mu = float(norms.max()) if norms.numel() else 0.0
    return Measures(p, log_phi, mu, mu_balanced, layers, (-imbalance).exp2())


def _layers(graph: PathGraph, units: UnitClasses, norms: Tensor, imbalance: Tensor) -> list[Layer]:
    """The families of units in order of evaluation; those with the same owners are one layer, as the parts
    of an attention's input projection are."""
    shown = {region: k for k, region in enumerate(graph.parameter_regions())}
    found: dict[tuple[tuple[str, ...], int | None], list[tuple[Tensor, Tensor]]] = {}
    start = 0
    for group in unit_groups(graph):
        heads = group.heads(units)
        own = norms[start : start + len(heads)]
        start += len(heads)
        region = shown.get(graph.regions[group.parts[0].node])
        found.setdefault((_owners(group, units), region), []).append((heads, own))
    layers = []
    for (owners, region), families in found.items():
        heads, own = (torch.cat(parts) for parts in zip(*families, strict=True))
        # UnitClasses that feed a square could be rescaled, but balancing leaves them as they are.
        free = (heads != FIXED) & ~units.squared[heads]
        spread = Spread.of(imbalance[heads[free]])
        layers.append(Layer(owners, region, len(heads), int(free.sum()), Spread.of(own), spread))
    return layers


def _owners(group: Group, units: UnitClasses) -> tuple[str, ...]:
    names = []
    for part in group.parts:
        parameter = part.operation.weight.parameter
        assert parameter is not None
        module = parameter.name.rpartition(".")[0]
        names.append(module if module and module in units.owners else parameter.name)
    return tuple(dict.fromkeys(names))
