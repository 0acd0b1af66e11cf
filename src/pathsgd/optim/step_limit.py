"""An invariant limit on the step: no unit's incoming weights move by more than a fraction of themselves.

Near-dead paths make huge steps: where gamma is small but not 0, g / gamma is large whatever the lr. A
branch that starts at zero (``y = x + g * W(x)`` with g = 0) moves W by about 1 at the second step. The
norm of a unit's incoming weights is not invariant, since they come from units with scales of their own;
in the coordinates z = w sqrt(gamma) it is, and there the step is limited:

    ||dz_u||_p <= max_relative_step ||z_u||_p.

A unit has all its incoming weights, its bias included, so a bias of zero is not held at zero. A unit
whose weights are all zero has nothing to measure by and moves freely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.geometry.gamma import Gammas
from pathsgd.geometry.unit_groups import Group, unit_groups
from pathsgd.graph.path_graph import PathGraph
from pathsgd.optim.gamma_cache import GammaCache


def check_limit(max_relative_step: float | None) -> None:
    if max_relative_step is not None and not max_relative_step > 0:
        raise ValueError(f"Invalid max_relative_step value: {max_relative_step}")


@dataclass(frozen=True)
class Incoming:
    """The incoming weights of a family of units that belong to one parameter, in rows."""

    name: str
    rows: int
    entries: Tensor | None
    """Which entry of the parameter stands where; None if its entries are the rows in their order."""
    row_of_unit: Tensor | None
    """The row that leads into each unit; None if there is one for each. Rows may lead into many units."""

    def powers(self, x: Tensor, p: float) -> Tensor:
        """``sum |x|^p`` of every unit (the largest |x| for p = inf), in fp64: nothing small is lost."""
        by_row = x.reshape(self.rows, -1) if self.entries is None else x.flatten()[self.entries.to(x.device)]
        norm = torch.linalg.vector_norm(by_row, p, 1, dtype=torch.float64)
        found = norm if math.isinf(p) else norm.pow(p)
        return found if self.row_of_unit is None else found[self.row_of_unit.to(x.device)]

    def spread(self, per_unit: Tensor, shape: torch.Size) -> Tensor:
        """One number for every entry of the parameter: the least of the units it leads into."""
        per_row = per_unit
        if self.row_of_unit is not None:
            index = self.row_of_unit.to(per_unit.device)
            per_row = per_unit.new_ones(self.rows).scatter_reduce(0, index, per_unit, "amin")
        if self.entries is None:
            return per_row[:, None].expand(self.rows, shape.numel() // self.rows).reshape(shape)
        entries = self.entries.to(per_unit.device)
        values = per_row[:, None].expand(entries.shape).flatten()
        least = per_unit.new_ones(shape.numel())
        return least.scatter_reduce(0, entries.flatten(), values, "amin").reshape(shape)


def find_families(graph: PathGraph) -> list[list[Incoming]]:
    """The units of a graph with their incoming weights, those that are path-normalised."""
    found = [_incoming(graph, group) for group in unit_groups(graph)]
    return [family for family in found if family]


def _incoming(graph: PathGraph, group: Group) -> list[Incoming]:
    parts = []
    for part in group.parts:
        parameter = part.operation.weight.parameter
        assert parameter is not None
        info = graph.parameters[parameter.name]
        if not info.normalised:
            continue
        entries = part.entries(info.shape)
        plain = torch.equal(entries.flatten(), torch.arange(math.prod(info.shape)))
        own = None if plain else entries
        parts.append(Incoming(info.name, entries.shape[0], own, part.row_of_unit()))
    return parts


class StepLimit:
    """Limits the steps of one model's parameters."""

    def __init__(self, gamma_cache: GammaCache) -> None:
        self.gamma_cache = gamma_cache
        self._families: list[list[Incoming]] | None = None

    @property
    def families(self) -> list[list[Incoming]]:
        """The units of the graph with their incoming weights, found once."""
        if self._families is None:
            self._families = find_families(self.gamma_cache.graph)
        return self._families

    def find(
        self,
        parameters: Sequence[Tensor],
        weights: Sequence[Tensor],
        steps: Sequence[Tensor],
        bounds: Sequence[float | None],
        p: float,
        gammas: Gammas | None = None,
    ) -> list[Tensor | None]:
        """What each step in invariant coordinates is to be multiplied by, so that no unit moves too far.

        Takes all parameters of a step together, with their weights from before it. A parameter without a
        bound gets None, but its step counts. ``gammas`` are those of the cache, unless given.
        """
        gammas = self.gamma_cache.gammas(p) if gammas is None else gammas
        known = self.gamma_cache.names
        names = [known.get(id(parameter)) for parameter in parameters]
        moved = {name: step for name, step in zip(names, steps, strict=True) if name is not None}
        limits = {n: b for n, b in zip(names, bounds, strict=True) if n is not None and b is not None}
        tensors: dict[str, Tensor] = dict(self.gamma_cache.model.named_parameters())
        tensors.update({name: w for name, w in zip(names, weights, strict=True) if name is not None})
        z = {
            name: gammas[name].weight_to_z(tensors[name].detach().to(gammas[name].dtype))
            for name in {part.name for family in self.families for part in family}
        }
        factors = find_factors(self.families, moved, z, limits, p)
        return [None if name is None else factors.get(name) for name in names]


def find_factors(
    families: list[list[Incoming]],
    steps: Mapping[str, Tensor],
    z: Mapping[str, Tensor],
    bounds: Mapping[str, float],
    p: float,
) -> dict[str, Tensor]:
    """By name of a parameter with a bound, the factor of each entry's step: less than 1 where it moves a unit
    too far for its weights ``z``."""
    factors: dict[str, Tensor] = {}
    for family in families:
        moved = [part for part in family if part.name in steps]
        if not any(part.name in bounds for part in moved):
            continue
        step = _norms([part.powers(steps[part.name], p) for part in moved], p)
        size = _norms([part.powers(z[part.name], p) for part in family], p)
        for part in moved:
            if part.name not in bounds:
                continue
            allowed = bounds[part.name] * size
            short = (size > 0) & (step > allowed)
            factor = torch.where(short, allowed / torch.where(short, step, 1), 1)
            least = part.spread(factor, steps[part.name].shape)
            before = factors.get(part.name)
            factors[part.name] = least if before is None else torch.minimum(before, least)
    return {name: factor.to(steps[name].dtype) for name, factor in factors.items()}


def _norms(powers: list[Tensor], p: float) -> Tensor:
    """The l_p norm of every unit's incoming weights together."""
    if math.isinf(p):
        return torch.stack(powers).amax(0)
    return torch.stack(powers).sum(0).pow(1 / p)
