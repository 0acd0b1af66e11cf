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
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.geometry.groups import Group, unit_groups
from pathsgd.graph.path_graph import PathGraph


def check_limit(max_relative_step: float | None) -> None:
    if max_relative_step is not None and not max_relative_step > 0:
        raise ValueError(f"Invalid max_relative_step value: {max_relative_step}")


@dataclass(frozen=True)
class Incoming:
    """The incoming weights of a family of units that belong to one parameter: one row for each unit."""

    name: str
    units: int
    entries: Tensor | None
    """Which entry of the parameter stands where; None if its entries are the rows in their order."""

    def rows(self, x: Tensor) -> Tensor:
        if self.entries is None:
            return x.reshape(self.units, -1)
        return x.flatten()[self.entries.to(x.device)]

    def spread(self, per_unit: Tensor, shape: torch.Size) -> Tensor:
        """One number for every entry of the parameter: the least of the units it leads into."""
        if self.entries is None:
            per_row = per_unit.reshape(-1, 1)
            return per_row.expand(self.units, shape.numel() // self.units).reshape(shape)
        entries = self.entries.to(per_unit.device)
        values = per_unit.reshape(-1, 1).expand(entries.shape)
        return per_unit.new_ones(shape.numel()).scatter_reduce(
            0, entries.flatten(), values.flatten(), "amin"
        ).reshape(shape)  # fmt: skip


def families(graph: PathGraph) -> list[list[Incoming]]:
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
        parts.append(Incoming(info.name, entries.shape[0], None if plain else entries))
    return parts


def limited(
    units: list[list[Incoming]],
    steps: Mapping[str, Tensor],
    z: Mapping[str, Tensor],
    p: float,
    max_relative_step: float,
) -> dict[str, Tensor]:
    """The steps in invariant coordinates, shortened where a unit's is too long for its weights ``z``."""
    factors: dict[str, Tensor] = {}
    for family in units:
        moved = [part for part in family if part.name in steps]
        if not moved:
            continue
        step = _norms([part.rows(steps[part.name]) for part in moved], p)
        size = _norms([part.rows(z[part.name]) for part in family], p)
        allowed = max_relative_step * size
        short = (size > 0) & (step > allowed)
        factor = torch.where(short, allowed / torch.where(short, step, 1), 1)
        for part in moved:
            least = part.spread(factor, steps[part.name].shape)
            before = factors.get(part.name)
            factors[part.name] = least if before is None else torch.minimum(before, least)
    return {
        name: step * factors[name].to(step.dtype) if name in factors else step for name, step in steps.items()
    }


def _norms(rows: list[Tensor], p: float) -> Tensor:
    """The l_p norm of every unit's rows together, in fp64: squares of small fp32 numbers are not lost."""
    norms = [torch.linalg.vector_norm(row, p, 1, dtype=torch.float64) for row in rows]
    return torch.linalg.vector_norm(torch.stack(norms), p, 0)
