"""The values of units at the ends of parameters, looked up for all parameters at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pathsgd.graph.unit_classes import EdgeClasses


class EdgeTable:
    """The classes at both ends of these parameters' entries, on one device."""

    def __init__(self, edges: Mapping[str, EdgeClasses], device: torch.device) -> None:
        self.degrees = {name: edge.degree for name, edge in edges.items()}
        self._heads = _Gather([edge.head for edge in edges.values()], device)
        self._tails = _Gather([edge.tail for edge in edges.values()], device)

    def look_up(self, at_heads: Tensor, at_tails: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """By parameter, what its entries are multiplied by and what they are divided by, from the values of
        classes; of shapes that expand to its own."""
        heads, tails = self._heads.run(at_heads), self._tails.run(at_tails)
        return {
            name: (head, tail if degree == 1 else tail**degree)
            for (name, degree), head, tail in zip(self.degrees.items(), heads, tails, strict=True)
        }


class _Gather:
    """Values by number, for several tensors of numbers in one call of torch."""

    def __init__(self, indices: list[Tensor], device: torch.device) -> None:
        self.shapes = [index.shape for index in indices]
        self.sizes = [index.numel() for index in indices]
        self.index = torch.cat([torch.empty(0, dtype=torch.int64), *(index.flatten() for index in indices)])
        self.index = self.index.to(device)

    def run(self, values: Tensor) -> list[Tensor]:
        found = values[self.index].split(self.sizes)
        return [piece.view(shape) for piece, shape in zip(found, self.shapes, strict=True)]
