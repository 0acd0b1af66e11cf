"""The spectral norms of all directions at once, as spectral.py finds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach
from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.relative.coordinates import RelativeMeasurement
from pathsgd.optim.relative.gpu.spectral_kernels import (
    BAND,
    COLUMNS,
    ROWS,
    backward_kernel,
    finish_kernel,
    forward_kernel,
)
from pathsgd.optim.relative.spectral import FIRST, KEY, make_vectors


class SpectralNorms:
    """Those of these parameters.

    Args:
        optimizer: in whose state the vectors are kept.
        parameters: by name, in the order of their blocks.
        measurement: that knows the blocks.
        directions: of all of them.
        begins: by the number of a block, where its direction begins.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        measurement: RelativeMeasurement,
        directions: Tensor,
        begins: Mapping[int, int],
    ) -> None:
        self.optimizer, self.parameters, self.directions = optimizer, list(parameters.values()), directions
        self.widths = [[block.matrix_shape[1] for block in measurement.by_name[name]] for name in parameters]
        matrices: list[list[int]] = []
        forward: list[tuple[int, int]] = []
        backward: list[tuple[int, int, int]] = []
        columns: list[Tensor] = []
        y = x = part = 0
        for k, number in enumerate(sorted(begins)):
            block = measurement.blocks[number]
            rows, width = block.matrix_shape
            matrices.append([begins[number], rows, width, y, x, part, number])
            bands = range(math.ceil(rows / BAND.value))
            forward += product([k], range(0, rows, ROWS.value))
            backward += product([k], bands, range(0, width, COLUMNS.value))
            columns.append(x + _order_columns(block, parameters[block.name].stride()))
            y, x, part = y + rows, x + width, part + len(bands) * width
        device = directions.device
        self.matrices = torch.tensor(matrices, device=device)
        self.forward, self.backward = (
            torch.tensor(each, dtype=torch.int32, device=device) for each in (forward, backward)
        )
        self.y, self.parts = directions.new_empty(y), directions.new_empty(part)
        self.norms = torch.ones(len(measurement.blocks), device=device)
        index = torch.cat(columns)
        self.index, self.back = index.to(device), index.argsort().to(device)

    def find(self) -> Tensor:
        """By block; 1 where the direction is zero, and of those that are not measured."""
        states = [self.optimizer.state[p] for p in self.parameters]
        new = [
            make_vectors(state, widths, self.directions)
            for state, widths in zip(states, self.widths, strict=True)
        ]
        vectors = [state[KEY] for state in states]
        fresh = [k for k, own in enumerate(new) if own]
        for written in [fresh] * (FIRST - 1 if fresh else 0) + [range(len(new))]:
            following = self._iterate(torch.cat(vectors)[self.index])[self.back].split([*map(len, vectors)])
            foreach("copy_", [vectors[k] for k in written], [following[k] for k in written])
        return self.norms

    def _iterate(self, x: Tensor) -> Tensor:
        """The vectors of the next iteration, in place."""
        forward_kernel[(len(self.forward),)](self.matrices, self.forward, self.directions, x, self.y)
        backward_kernel[(len(self.backward),)](
            self.matrices, self.backward, self.directions, self.y, self.parts
        )
        finish_kernel[(len(self.matrices),)](self.matrices, x, self.y, self.parts, self.norms)
        return x


def _order_columns(block: Block, stride: Sequence[int]) -> Tensor:
    """The columns of a block as they lie in memory, where the inputs may come last."""
    shape = [block.length if d == block.axis else n for d, n in enumerate(block.shape)][1:]
    dims = sorted(range(len(shape)), key=lambda d: -stride[d + 1])
    return torch.arange(math.prod(shape)).view(shape).permute(dims).flatten()
