"""The blocks of the parameters that a step moves, and what a step has to know of each.

A block is a parameter, or the rows of one that are used together. Numbers of blocks, such as norms, are kept
in one vector for all, in fp64.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pathsgd.graph.path_graph import PathGraph
from pathsgd.muon.blocks import Block, find_blocks
from pathsgd.muon.sizes import Sizes
from pathsgd.sharding import local_part, shards_of


class BlockTable:
    """The blocks of these parameters.

    Args:
        graph: of the model.
        names: of its parameters, by id.
        moved: the parameters of a step.
        groups: the optimizer's.

    Attributes:
        owners: by block, the number of its parameter in ``moved``.
        orthogonal: the blocks whose direction is orthogonalised.
        matrices, others: the parameters with such blocks, and those without.
        group_of: by parameter, the number of its group.
    """

    def __init__(
        self, graph: PathGraph, names: Mapping[int, str], moved: list[Tensor], groups: list[dict[str, Any]]
    ) -> None:
        self.moved, self.groups = moved, groups
        self.device = local_part(moved[0]).device
        found = find_blocks(graph)
        self.blocks: list[Block] = []
        self.owners: list[int] = []
        for k, p in enumerate(moved):
            own = found[names[id(p)]] if id(p) in names else [_make_stray(p, -1 - k)]
            shards = shards_of(p)
            self.blocks += [replace(block, shards=shards) for block in own]
            self.owners += [k] * len(own)
        self.shards = [block.shards for block in self.blocks]
        self.orthogonal = [k for k, block in enumerate(self.blocks) if block.orthogonal]
        chosen = {self.owners[k] for k in self.orthogonal}
        self.matrices = [k for k in range(len(moved)) if k in chosen]
        self.others = [k for k in range(len(moved)) if k not in chosen]
        group_of = {id(p): k for k, group in enumerate(groups) for p in group["params"]}
        self.group_of = [group_of[id(p)] for p in moved]
        by_block = [self.group_of[owner] for owner in self.owners]
        self._masks = [self.put([own == k for own in by_block]) for k in range(len(groups))]
        self.sizes = Sizes(self.blocks, self.device)
        self.shares = self.put([1 / block.share for block in self.blocks])
        self.numel = self.put([block.numel for block in self.blocks])
        self.is_orthogonal = self.put([block.orthogonal for block in self.blocks]) > 0

    def put(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def fits(self, moved: list[Tensor]) -> bool:
        """Whether it is of these parameters."""
        return len(moved) == len(self.moved) and all(map(operator.is_, moved, self.moved))

    def cut(self, tensors: list[Tensor]) -> list[Tensor]:
        """The blocks of tensors, of which there is one for each parameter."""
        return [block.of(tensors[owner]) for block, owner in zip(self.blocks, self.owners, strict=True)]

    def find_option(self, name: str, part: int | None = None) -> float | Tensor:
        """An option of the groups by block; one number where all have the same."""
        first, *others = (group[name] if part is None else group[name][part] for group in self.groups)
        if all(value is first or (not isinstance(value, Tensor) and value == first) for value in others):
            return first
        pairs = zip((first, *others), self._masks, strict=True)
        return torch.stack([value * mask for value, mask in pairs]).sum(0)


def _make_stray(p: Tensor, family: int) -> Block:
    """A parameter that is not the model's: it takes relative steps in Adam's direction."""
    shape, nothing = tuple(p.shape), torch.zeros(1, dtype=torch.int64)
    length = shape[0] if shape else 1
    return Block("", shape, 0, 0, length, family, False, 1.0, False, nothing, nothing)
