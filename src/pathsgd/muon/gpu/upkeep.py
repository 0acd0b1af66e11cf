"""Rounds of balancing, and the entries that are remembered, by kernels: see ``muon/upkeep.py``.

In a CUDA graph, whose replays cannot count steps on the host, rounds are counted on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pathsgd._torch import is_capturing
from pathsgd.graph.unit_classes import FIXED, EdgeClasses
from pathsgd.graph.unit_relations import Relations
from pathsgd.muon.gpu.kernels import (
    CHUNK,
    COLUMNS,
    ROWS,
    UNIT_FIELDS,
    column_kernel,
    gather_kernel,
    rescale_kernel,
    row_kernel,
)
from pathsgd.muon.gpu.step import is_readable
from pathsgd.muon.round import EVERY, find_factors, list_places
from pathsgd.training.capture import AddressTable, on_device

AT_ONCE = 1024


class KernelUpkeep:
    """The units of these parameters, as rows and columns of each.

    Attributes:
        is_supported: whether every unit is the rows or the columns of its parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        edges: Mapping[str, EdgeClasses],
        relations: Relations,
        held: Tensor,
    ) -> None:
        self.parameters = list(parameters.values())
        self.device = self.parameters[0].device
        self.is_supported = all(map(is_readable, self.parameters))
        heads, tails, fields = [], [], []
        row_tiles: list[Tensor] = []
        column_tiles: list[Tensor] = []
        chunks: list[Tensor] = []
        start = 0
        for k, (name, p) in enumerate(parameters.items()):
            edge = edges[name]
            rows = len(p) if p.dim() else 1
            columns = p.numel() // max(1, rows)
            ends = [_split(ids, p, rows, columns) for ids in (edge.head, edge.tail)]
            if not self.is_supported or any(end is None for end in ends):
                self.is_supported = False
                return
            for side in (0, 1):  # rows, then columns
                head, tail = (end[side] for end in ends)  # type: ignore[index]
                heads.append(head)
                tails.append(tail)
                if not bool((held[head] & held[tail]).all()):
                    tiles, step = ((row_tiles, ROWS), (column_tiles, COLUMNS))[side]
                    tiles.append(_pair(k, (rows, columns)[side], step.value))
            fields.append([0, 0, 0, rows, columns, start, start + rows])
            chunks.append(_pair(k, p.numel(), CHUNK.value))
            start += rows + columns

        def put(values: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
            return values.to(self.device, dtype)

        empty = torch.empty(0, 2, dtype=torch.int64)
        self.row_tiles, self.column_tiles, self.chunks = (
            put(torch.cat([empty, *tiles]), torch.int32) for tiles in (row_tiles, column_tiles, chunks)
        )
        head, tail = torch.cat(heads), torch.cat(tails)
        leads_in = torch.arange(2 * start) < start
        self.grows, self.shrinks = (
            put(torch.where(places < 2 * start, places % start, start))
            for places in list_places(relations, torch.cat([head, tail]), leads_in, held)
        )
        self.heads, self.tails, self.relations = put(head), put(tail), relations.to(self.device)
        self.free = put(~held & relations.is_free, torch.bool)
        self.sums = torch.zeros(start + 1, device=self.device)
        """And a zero after the last, where a class has no more places."""
        self.exact = torch.zeros_like(self.free)  # kernels take fp32 alone
        self.steps = torch.zeros((), dtype=torch.int64, device=self.device)
        assert len(fields[0]) == UNIT_FIELDS.value
        self.table = AddressTable(torch.tensor(fields), self.device)

    def run(self, state: MutableMapping[Tensor, Any], steps: int) -> None:
        """Does a round after every ``EVERY`` steps; in a CUDA graph steps are counted on the device."""
        self.steps.fill_(steps) if not is_capturing() else self.steps.add_(1)
        if steps % EVERY and not is_capturing():
            return
        self._point(state)
        due = self.steps, EVERY
        with on_device(self.device):
            for kernel, tiles in ((row_kernel, self.row_tiles), (column_kernel, self.column_tiles)):
                if len(tiles):
                    kernel[len(tiles),](self.table.on_device, tiles, *due, self.sums)
            grows, shrinks = self.sums[self.grows].sum(1), self.sums[self.shrinks].sum(1)
            factor = find_factors(grows, shrinks, self.free, self.relations, self.exact)
            factors = factor[self.heads] / factor[self.tails]
            rescale_kernel[len(self.chunks),](self.table.on_device, self.chunks, *due, factors)
        torch.autograd.graph.increment_version(self.parameters)

    def _point(self, state: MutableMapping[Tensor, Any]) -> None:
        """Tells the kernels where everything lies now."""
        addresses = []
        for p in self.parameters:
            own_state = state.get(p, {})
            first = own_state.get("momentum_buffer", own_state.get("exp_avg"))
            second = own_state.get("exp_avg_sq")
            addresses += [p.data_ptr(), *(0 if x is None else x.data_ptr() for x in (first, second))]
        self.table.point(addresses, 3, lambda by_parameter: by_parameter)


class KernelGather:
    """Reads the remembered entries of all parameters at once, into parts of one tensor.

    Args:
        parameters: whose entries are read.
        states: of each, with the numbers of its entries; their values become parts of that tensor.
    """

    def __init__(self, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        self.indices = [state["reference_index"] for state in states]
        addresses = []
        for p, index in zip(parameters, self.indices, strict=True):
            places = torch.unravel_index(index, p.shape) if p.dim() else ()
            steps = [place * stride for place, stride in zip(places, p.stride(), strict=True)]
            addresses.append(p.data_ptr() + 4 * sum(steps, torch.zeros_like(index)))
        self.addresses = torch.cat(addresses)
        self.places = [p.data_ptr() for p in parameters]
        self.values = torch.empty(len(self.addresses), device=self.addresses.device)
        self.parts = self.values.split([len(index) for index in self.indices])
        for state, part in zip(states, self.parts, strict=True):
            state["reference_value"] = part

    def fits(self, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> bool:
        """Whether parameters and states are where they were."""
        return all(
            p.data_ptr() == place and state["reference_value"] is part and state["reference_index"] is index
            for p, place, state, part, index in zip(
                parameters, self.places, states, self.parts, self.indices, strict=True
            )
        )

    def run(self) -> None:
        """Reads them."""
        count = len(self.addresses)
        with on_device(self.values.device):
            gather_kernel[-(-count // AT_ONCE),](self.addresses, self.values, count, AT_ONCE)


def _pair(number: int, size: int, step: int) -> Tensor:
    starts = torch.arange(0, size, step)
    return torch.stack([torch.full_like(starts, number), starts], 1)


def _split(ids: Tensor, p: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor] | None:
    """Classes by row, and classes by column as they lie in memory; None if they change along both."""
    ids = ids.reshape((1,) * (p.dim() - ids.dim()) + tuple(ids.shape))
    by_row = p.dim() > 0 and ids.shape[0] > 1
    by_column = any(n > 1 for n in ids.shape[1:])
    if by_row and by_column:
        return None
    fixed = torch.full((max(rows, columns),), FIXED)
    if not by_column:
        return ids.reshape(-1).expand(rows), fixed[:columns]
    inner = ids[0].expand(p.shape[1:])
    order = sorted(range(inner.dim()), key=lambda d: -p.stride(d + 1))
    return fixed[:rows], inner.permute(order).reshape(-1)
