"""The size of every block: the root mean square of its weights, or that of its family.

A family is the blocks that lead into the same units. A bias moves by the size of its layer's weights; a
matrix of zeros, which has no size of its own, by a share of what its family would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pathsgd.graph.unit_classes import FIXED
from pathsgd.muon.blocks import Block

SHARE = 0.3
"""A matrix has at least this share of its family's size, so that one of zeros moves. Units that the model
returns, or that go into a norm, are given this share of the size of others."""


class Sizes:
    """The numbers that the sizes of these blocks are computed from, laid out for one device.

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
        incoming = [sum(blocks[k].numel for k in own) / max(1, blocks[own[0]].length) for own in members]
        leading = [sum(blocks[k].numel for k in own if leads[k]) for own in members]
        shares = [SHARE if FIXED in blocks[own[0]].heads else 1.0 for own in members]

        def put(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        self.length = put([block.numel for block in blocks]).sqrt()
        self.turning = put([block.turns for block in blocks])
        self.share = put([SHARE if block.turns else 1.0 for block in blocks])
        # The least size of a family: that of weights into a unit which have norm 1 together.
        self.least = put([share / max(1.0, n) ** 0.5 for share, n in zip(shares, incoming, strict=True)])
        self.members, filled = _pad(members, device)
        own_part = put([block.numel * lead for block, lead in zip(blocks, leads, strict=True)])
        self.parts = own_part[self.members] * filled / put(leading).clamp(min=1)[:, None]
        # find_noise compares a bias with its family, and a matrix with itself: it is never noise.
        self.compared, _ = _pad([[k] if blocks[k].turns else own for k, own in enumerate(members)], device)

    def measure(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """(sizes, which blocks turn) from the norms of all blocks, in fp64. A block that is smaller than the
        share of its family's size grows freely."""
        rms = norms / self.length
        family = rms.square()[self.members].mul_(self.parts).sum(1).sqrt()
        of_matrix = rms * self.turning
        size = torch.maximum(of_matrix, self.share * torch.maximum(family, self.least))
        return size, of_matrix >= size

    def find_noise(self, gradients: Tensor, bound: float) -> Tensor:
        """Which blocks that do not turn, as biases, have a gradient that is nothing beside their family's,
        from the norms of all gradients: it is zero by symmetry, as that of a bias before a batch norm, and
        all of it is rounding."""
        rms = gradients / self.length
        return rms < bound * rms[self.compared].amax(1)


def _pad(rows: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of one length, filled up with their first entry, and which entries are there: 1 or 0, in fp64."""
    width = max(map(len, rows))
    padded = torch.tensor([row + row[:1] * (width - len(row)) for row in rows])
    filled = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    return padded.to(device), filled.to(device, torch.float64)
