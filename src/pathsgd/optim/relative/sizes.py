"""The size of every block in invariant coordinates: the root mean square of its z, or of its family's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pathsgd.geometry.canonical import UnitFactors
from pathsgd.geometry.extended_float import exact_ldexp
from pathsgd.graph.unit_classes import FIXED
from pathsgd.optim.relative.blocks import Block

SHARE = 0.1
"""A matrix has at least this share of its family's size, so that one of zeros moves."""

SMALL = 0.3
"""A matrix that is smaller than this share of its family's size grows as fast as one of that size."""


class SizeTable:
    """What the sizes of these blocks are computed from, laid out for one device.

    By block, what is a family's too: no step has to look for a block's family.
    """

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        families: dict[int, list[int]] = {}
        for k, block in enumerate(blocks):
            families.setdefault(block.family, []).append(k)
        members = [families[block.family] for block in blocks]
        # A family's size is that of its matrices, if it has any.
        leads = [
            block.turns or not any(blocks[j].turns for j in own)
            for block, own in zip(blocks, members, strict=True)
        ]
        edges = [sum(blocks[k].numel for k in own) for own in members]
        leading = [sum(blocks[k].numel for k in own if leads[k]) for own in members]
        units = [max(1, blocks[own[0]].length) for own in members]
        least = [SHARE if FIXED in blocks[own[0]].heads else 1.0 for own in members]

        def put(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        self.length = put([block.numel for block in blocks]).sqrt()
        self.turning = put([block.turns for block in blocks])
        self.share = put([SHARE if block.turns else 1.0 for block in blocks])
        self.least = put([x / max(1.0, n / m) ** 0.5 for x, n, m in zip(least, edges, units, strict=True)])
        self.members, filled = _pad(members, device)
        own_part = put([block.numel * lead for block, lead in zip(blocks, leads, strict=True)])
        self.parts = own_part[self.members] * filled / put(leading).clamp(min=1)[:, None]
        # What turns is compared with itself.
        self.compared, _ = _pad([[k] if blocks[k].turns else own for k, own in enumerate(members)], device)
        ends = [block.tails.unique().tolist() for block in blocks]
        ends += [blocks[own[0]].heads.unique().tolist() for own in members]
        self.ends, filled = _pad(ends, device)
        self.weights = filled / filled.sum(1, keepdim=True)

    def measure(self, norms: Tensor, factors: UnitFactors | None) -> tuple[Tensor, Tensor, Tensor]:
        """(sizes, which blocks turn, how much faster than others they grow) from the norms of all blocks' z,
        in fp64."""
        rms = norms / self.length
        tails, heads = self._measure_ends(factors)
        # In units of what a weight contributes to the unit it leads into.
        power = (rms * tails).square()[self.members].mul_(self.parts).sum(1)
        given = torch.maximum(power.sqrt(), self.least * heads) / tails
        own = rms * self.turning
        size = torch.maximum(own, self.share * given)
        # A block that is smaller than the size its family gives it grows freely.
        return size, own >= size, F.threshold(given / size, 1 / SMALL, 1.0)

    def _measure_ends(self, factors: UnitFactors | None) -> tuple[Tensor, Tensor]:
        """The root mean square magnitude of the units at the tails of every block, and at its heads."""
        if factors is None:
            one = torch.ones_like(self.length)
            return one, one
        magnitude, exponent = factors.magnitude
        magnitude = magnitude.double()
        if exponent is not None:
            magnitude = exact_ldexp(magnitude, exponent.clamp(-1000, 1000))
        tails, heads = magnitude.square()[self.ends].mul_(self.weights).sum(1).sqrt().chunk(2)
        return tails, heads

    def find_noise(self, norms: Tensor, bound: float) -> Tensor:
        """Which blocks that do not turn, as biases, have a gradient that is nothing beside their family's: it
        is zero by symmetry, as that of a bias before a batch norm, and all of it is rounding."""
        rms = norms / self.length
        return rms < bound * rms[self.compared].amax(1)


def _pad(rows: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of one length, filled up with their first entry, and which entries are there: 1 or 0, in fp64."""
    width = max(map(len, rows))
    padded = torch.tensor([row + row[:1] * (width - len(row)) for row in rows])
    filled = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    return padded.to(device), filled.to(device, torch.float64)
