"""Units keep their scale, and do not fade away.

A relative step sees only what rescalings leave alone. So nothing holds the scale of a unit: what leads into
it shrinks and what leads out of it grows, or the other way round, by up to ``lr`` a step, until weights leave
the range of floats, a thousand steps later. Since rescaling changes neither the function nor any later step,
every step takes back by how much the factor of each unit has moved beside those of its layer.

And what leads into or out of a unit without a gradient, as a dead one, shrinks whenever its matrix turns. It
does so until hardly any path is left, and no further.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd.geometry.canonical import LEAST, UnitFactors, places_of
from pathsgd.geometry.extended_float import exact_ldexp
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.unit_classes import unit_classes_of
from pathsgd.optim.relative.edges import EdgeTable
from pathsgd.optim.rule import multi_tensor

KEY = "unit_scales"
"""In the state of one parameter: the factors that are kept, by class; 0 if not known yet."""

MOST = 2.0
"""The most that one step rescales a unit by."""


class Rescaling(NamedTuple):
    """By class, what is multiplied: what leads into it by the first, what leads out of it by 1 / second."""

    into: Tensor
    out: Tensor

    def apply_(self, weights: Mapping[str, Tensor], edges: EdgeTable) -> None:
        """Rescales parameters in place, in fp32 at least."""
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, weight in weights.items():
            by_dtype.setdefault(torch.promote_types(weight.dtype, torch.float32), []).append(name)
        for dtype, names in by_dtype.items():
            factors = edges.look_up(self.into.to(dtype), self.out.to(dtype))
            wide = [weights[name].to(dtype) for name in names]
            multi_tensor("mul_", wide, [factors[name][0] for name in names])
            multi_tensor("div_", wide, [factors[name][1] for name in names])
            for name, new in zip(names, wide, strict=True):
                if weights[name] is not new:
                    weights[name].copy_(new)


class UnitState(NamedTuple):
    """Of every class, in fp64."""

    factor: Tensor
    """0 where there is none."""
    power: Tensor
    """The square of what passes it, beside the mean of its layer."""
    lift: Tensor
    """What both sides of a unit that has faded away are multiplied by, 1 for the others."""


def find_kept(optimizer: Optimizer, moved: Tensor) -> dict[str, Any]:
    """The state with the factors that are kept; at first that of a parameter that has been moved: torch's
    optimizers make their own state only where there is none."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in optimizer.state and KEY in optimizer.state[p]:
                return optimizer.state[p]
    return optimizer.state[moved]


def read_units(factors: UnitFactors) -> UnitState:
    mantissa, exponent = factors.factor
    found, presence = mantissa.double(), factors.presence.double()
    if exponent is not None:
        found = exact_ldexp(found, exponent.clamp(-1000, 1000))
    live = presence > 0
    lift = (2.0**-LEAST / torch.where(live, presence, 1)).clamp(1, MOST)
    return UnitState(torch.where(live, found, 0), presence.square(), lift)


class UnitScales:
    """What keeps the scales of one graph's units.

    Args:
        graph: whose classes the factors are of.
        moved: the parameters that a step moves; a unit that others lead into or out of is left alone.
        device: where they are.
    """

    def __init__(self, graph: PathGraph, moved: Collection[str], device: torch.device) -> None:
        classes = unit_classes_of(graph)
        places = places_of(graph, device)
        self.layers, self.layer = places.layers, places.layer
        free = torch.ones(classes.count, dtype=torch.bool)
        for name, edge in classes.parameters.items():
            if name not in moved:
                free[edge.head.flatten()] = False
                free[edge.tail.flatten()] = False
        self.free = free.to(device)

    def find_rescaling(self, state: dict[str, Any], units: UnitState) -> Rescaling:
        """What to rescale every class by, from its factor now; the first factor seen is the one kept."""
        if KEY not in state:
            state[KEY] = torch.zeros_like(units.factor)
        kept = state[KEY]
        known = self.free & (units.factor > 0) & (kept > 0)
        drift = torch.where(known, units.factor / torch.where(known, kept, 1), 1)
        # In place, so that a CUDA graph finds it where it was.
        kept.copy_(torch.where(kept > 0, kept, units.factor))
        # Weighted as units are in the norm of a matrix, which turning keeps: so what is left is its growth.
        power = torch.where(known, units.power, 0)
        total = torch.stack([power * drift.log(), power])
        total = torch.cat([total, total.new_zeros(2, 1)], 1)[:, self.layers].sum(2)
        mean = (total[0] / torch.where(total[1] > 0, total[1], 1)).exp()[self.layer]
        back = torch.where(known, (drift / mean).clamp(1 / MOST, MOST), 1)
        lift = torch.where(known, units.lift, 1)
        return Rescaling(back * lift, back / lift)
