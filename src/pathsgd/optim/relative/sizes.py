"""The size of every block in invariant coordinates: the root mean square of its z, or of its family's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pathsgd.geometry.canonical import UnitFactors
from pathsgd.geometry.extended_float import exact_ldexp
from pathsgd.graph.unit_classes import FIXED
from pathsgd.optim.relative.blocks import Block

SHARE = 0.1
"""A matrix has at least this share of its family's size, so that one of zeros moves."""

SMALL = 0.3
"""A matrix that is smaller than this share of its family's size grows as fast as one of that size."""


class SizeTable:
    """What the sizes of these blocks are computed from, laid out for one device."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        number: dict[int, int] = {}
        members: list[list[int]] = []
        for k, block in enumerate(blocks):
            if number.setdefault(block.family, len(members)) == len(members):
                members.append([])
            members[number[block.family]].append(k)

        def put(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        def pad(rows: list[Tensor], empty: int) -> Tensor:
            return pad_sequence(rows, batch_first=True, padding_value=empty).to(device)

        # A family's size is that of its matrices, if it has any.
        leads = {
            k for own in members for k in own if blocks[k].turns or not any(blocks[j].turns for j in own)
        }
        edges = [sum(blocks[k].numel for k in own) for own in members]
        units = [max(1, blocks[own[0]].length) for own in members]
        self.numel = put([block.numel for block in blocks])
        self.turns = torch.tensor([block.turns for block in blocks], device=device)
        self.family = torch.tensor([number[block.family] for block in blocks], device=device)
        self.members = pad([torch.tensor(own) for own in members], len(blocks))
        self.leading = put([block.numel * (k in leads) for k, block in enumerate(blocks)])
        self.edges = put([sum(blocks[k].numel for k in own if k in leads) for own in members])
        self.fan_in = put([max(1.0, n / m) for n, m in zip(edges, units, strict=True)])
        self.tails = pad([block.tails.unique() for block in blocks], -1)
        self.least = put([SHARE if FIXED in blocks[own[0]].heads else 1.0 for own in members])
        self.heads = pad([blocks[own[0]].heads.unique() for own in members], -1)

    def measure(self, norms: Tensor, factors: UnitFactors | None) -> tuple[Tensor, Tensor, Tensor]:
        """(sizes, which blocks turn, how much faster than others they grow) from the norms of all blocks' z,
        in fp64."""
        rms = norms / self.numel.sqrt()
        tails = heads = torch.ones_like(rms[:1])
        if factors is not None:
            magnitude, exponent = factors.magnitude
            magnitude = magnitude.double()
            if exponent is not None:
                magnitude = exact_ldexp(magnitude, exponent.clamp(-1000, 1000))
            tails, heads = _root_mean_square(magnitude, self.tails), _root_mean_square(magnitude, self.heads)
        # In units of what a weight contributes to the unit it leads into.
        power = torch.cat([(rms * tails).square() * self.leading, rms.new_zeros(1)])[self.members].sum(1)
        typical = torch.maximum((power / self.edges).sqrt(), self.least * heads / self.fan_in.sqrt())
        given = typical[self.family] / tails
        size = torch.where(self.turns, torch.maximum(rms, SHARE * given), given)
        # A block that is smaller than the size its family gives it grows freely.
        turns = self.turns & (rms >= size)
        return size, turns, torch.where(rms < SMALL * given, given / size, 1)

    def find_noise(self, norms: Tensor, bound: float) -> Tensor:
        """Which blocks that do not turn, as biases, have a gradient that is nothing beside their family's: it
        is zero by symmetry, as that of a bias before a batch norm, and all of it is rounding."""
        rms = norms / self.numel.sqrt()
        largest = torch.cat([rms, rms.new_zeros(1)])[self.members].amax(1)
        return ~self.turns & (rms < bound * largest[self.family])


def _root_mean_square(magnitude: Tensor, index: Tensor) -> Tensor:
    """The root mean square over the classes of every row."""
    filled = index >= 0
    squares = magnitude[index.clamp(min=0)].square() * filled
    return (squares.sum(1) / filled.sum(1)).sqrt()
