"""The spectral norms of all directions at once, one batch for each shape; as spectral.py finds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach
from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.relative.coordinates import RelativeMeasurement
from pathsgd.optim.relative.spectral import FIRST, KEY, iterate, make_vectors


class SpectralNorms:
    """Those of these parameters.

    Args:
        optimizer: in whose state the vectors are kept.
        parameters: by name, in the order of their blocks.
        measurement: that knows the blocks.
        order: the numbers of their blocks, batch by batch.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        measurement: RelativeMeasurement,
        order: Tensor,
    ) -> None:
        self.optimizer, self.parameters = optimizer, list(parameters.values())
        self.widths = [[block.matrix_shape[1] for block in measurement.by_name[name]] for name in parameters]
        columns, start = {}, 0
        for k in sorted(order.tolist()):
            block = measurement.blocks[k]
            columns[k] = start + _order_columns(block, parameters[block.name].stride())
            start += len(columns[k])
        index = torch.cat([columns[k] for k in order.tolist()])
        self.index, self.back = index.to(order.device), index.argsort().to(order.device)

    def find(self, batches: Sequence[Tensor]) -> Tensor:
        """By matrix, batch by batch."""
        states = [self.optimizer.state[p] for p in self.parameters]
        new = [
            make_vectors(state, widths, batches[0]) for state, widths in zip(states, self.widths, strict=True)
        ]
        vectors = [state[KEY] for state in states]
        fresh = [k for k, own in enumerate(new) if own]
        for written in [fresh] * (FIRST - 1 if fresh else 0) + [range(len(new))]:
            x = torch.cat(vectors)[self.index]
            parts = x.split([len(batch) * batch.shape[2] for batch in batches])
            found = [
                iterate(batch, own.view(len(batch), -1)) for batch, own in zip(batches, parts, strict=True)
            ]
            following = torch.cat([x.flatten() for _, x in found])[self.back].split([*map(len, vectors)])
            foreach("copy_", [vectors[k] for k in written], [following[k] for k in written])
        return torch.cat([norms for norms, _ in found])


def _order_columns(block: Block, stride: tuple[int, ...]) -> Tensor:
    """The columns of a block as they lie in memory, where the inputs may come last."""
    shape = [block.length if d == block.axis else n for d, n in enumerate(block.shape)][1:]
    dims = sorted(range(len(shape)), key=lambda d: -stride[d + 1])
    return torch.arange(math.prod(shape)).view(shape).permute(dims).flatten()
