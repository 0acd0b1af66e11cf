"""A relative step of Muon or AdamW by kernels: the formula of view.py, muon.py, spectral.py and growth.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach, has_step_hooks, is_capturing
from pathsgd.optim.relative.coordinates import NOISE, BlockSubset
from pathsgd.optim.relative.gpu.kernels import (
    SUMS,
    WARPS,
    adam_kernel,
    direction_kernel,
    momentum_kernel,
    move_kernel,
    norm_kernel,
    scale_kernel,
)
from pathsgd.optim.relative.gpu.layout import Tiles
from pathsgd.optim.relative.gpu.measurement import UnitCoordinates, UnitMeasurement
from pathsgd.optim.relative.gpu.spectral_norms import SpectralNorms
from pathsgd.optim.relative.muon import (
    RelativeMuon,
    find_averages,
    find_momentum,
    is_orthogonal,
    orthogonalize,
)
from pathsgd.optim.relative.unit_scales import Rescaling

OPTIONS = ("momentum", "nesterov", "betas", "eps")
"""Those that cannot differ between groups here."""

Option = Callable[[BlockSubset, str], "float | Tensor"]
Grow = Callable[[BlockSubset, Tensor], Tensor]


def is_supported(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether the kernels know the optimizer's rule and can read its parameters and their gradients."""
    groups = optimizer.param_groups
    return (
        type(optimizer) in (RelativeMuon, torch.optim.AdamW)
        and not has_step_hooks(optimizer)
        and not any(group.get(name) for group in groups for name in ("amsgrad", "maximize", "differentiable"))
        and all(group.get(name) == groups[0].get(name) for group in groups for name in OPTIONS)
        and all(p.dtype == torch.float32 and _is_like(p.grad, p) for p in parameters)
    )


def _is_like(grad: Tensor | None, p: Tensor) -> bool:
    return (
        grad is not None
        and grad.layout == torch.strided
        and grad.dtype == p.dtype
        and grad.stride() == p.stride()
    )


class KernelStep:
    """The steps of these parameters of one model.

    Args:
        optimizer: whose rule and state it is.
        measurement: of the whole model.
        parameters: those that have gradients, by name.
    """

    def __init__(
        self, optimizer: Optimizer, measurement: UnitMeasurement, parameters: Mapping[str, Tensor]
    ) -> None:
        self.optimizer, self.measurement, self.parameters = optimizer, measurement, dict(parameters)
        blocks, layout = measurement.blocks, measurement.layout
        self.device = layout.device
        names = list(parameters)
        muon = isinstance(optimizer, RelativeMuon)
        by_name = measurement.by_name
        self.matrices = {n for n in names if (is_orthogonal(by_name[n]) if muon else by_name[n][0].turns)}
        """Whose directions are looked at as matrices: Muon orthogonalises them, Adam's are measured."""
        self.moved = [k for k, block in enumerate(blocks) if block.name in parameters]
        matrices = [k for k in self.moved if blocks[k].name in self.matrices]
        others = [k for k in self.moved if blocks[k].name not in self.matrices]
        turning = [k for k in self.moved if blocks[k].turns]
        # Families in which a gradient may be rounding beside another's.
        gated = {blocks[k].family for k in others if not blocks[k].turns}
        self.orthogonal_tiles, self.other_tiles = layout.choose(matrices), layout.choose(others)
        self.gated_tiles = layout.choose([k for k in others if blocks[k].family in gated])
        self.turning_tiles = layout.choose(turning)
        self.all = measurement.subset(names, self.device)
        self.turning = measurement.subset([n for n in names if measurement.by_name[n][0].turns], self.device)
        self.index = torch.tensor(self.moved, device=self.device)
        self.turning_index = torch.tensor(turning, device=self.device)
        self.ratios = torch.tensor(self.all.ratios, device=self.device)
        self.fields = layout.fields.clone()
        self.pieces = [piece for k in self.moved for piece in layout.pieces_of[k]]
        dtype = torch.bfloat16 if muon and self.device.type == "cuda" else torch.float32
        self.directions, self.batches, self.order = self._place_directions(matrices, dtype)
        measured = {n: p for n, p in parameters.items() if n in self.matrices and not muon}
        self.norms = SpectralNorms(optimizer, measured, measurement, self.order) if measured else None
        self.ones = torch.ones(len(layout.heads), device=self.device)
        self.pointed = self.fields.to(self.device)
        number = {name: k for k, name in enumerate(names)}
        self._parameter_of = torch.tensor([number[layout.names[piece]] for piece in self.pieces])
        self._bytes = 4 * torch.tensor([layout.offsets[piece] for piece in self.pieces])
        self._addresses: list[list[int]] = []
        self._gradients: list[int] = []
        self._spare = self._make_room()
        self._captured: list[Tensor] = []

    def _make_room(self) -> Tensor:
        return torch.empty(self.fields.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _place_directions(
        self, matrices: list[int], dtype: torch.dtype
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """All directions in one list, those of each shape as a batch of matrices, and whose they are."""
        layout, blocks = self.measurement.layout, self.measurement.blocks
        by_shape: dict[tuple[int, int], list[int]] = {}
        for k in matrices:
            by_shape.setdefault(blocks[k].matrix_shape, []).append(k)
        batches, start = [], 0
        for (rows, columns), own in by_shape.items():
            batches.append((start, len(own), rows, columns))
            for k in own:
                for piece in layout.pieces_of[k]:
                    self.fields[piece, 12] = start
                    start += math.prod(self.fields[piece, 5:7].tolist())
        directions = torch.empty(start, dtype=dtype, device=self.device)
        order = torch.tensor([k for own in by_shape.values() for k in own], device=self.device)
        return (
            directions,
            [directions[first : first + math.prod(shape)].view(shape) for first, *shape in batches],
            order,
        )

    def point(self, gradients_only: bool = False) -> None:
        """Tells the kernels where everything lies now, or the gradients, if nothing else has moved."""
        capturing = is_capturing()
        gradients = [p.grad.data_ptr() for p in self.parameters.values()]  # type: ignore[union-attr]
        if gradients_only and gradients == self._gradients:
            return
        if not gradients_only:
            addresses = [self._find_tensors(name, p) for name, p in self.parameters.items()]
            if gradients == self._gradients and addresses == self._addresses and not capturing:
                return
            self._addresses = addresses
        self._gradients = gradients
        fields = self._spare
        found = torch.tensor(self._addresses)
        found[:, 1] = torch.tensor(gradients)
        found = found[self._parameter_of]
        found[:, :4] += self._bytes[:, None]
        fields.copy_(self.fields)
        fields[self.pieces, :5] = found
        self.pointed.copy_(fields, non_blocking=True)
        if capturing:
            self._captured.append(fields)  # a replay copies it again
        # The room is the copy's until it has happened; torch's host allocator knows when.
        self._spare = self._make_room()

    def _find_tensors(self, name: str, p: Tensor) -> list[int]:
        """The addresses of weight, (gradient,) state and number of steps; state is made at the first step."""
        state = self.optimizer.state[p]
        if name in self.matrices and self.norms is None:
            buffer = find_momentum(state, p).data_ptr()
            return [p.data_ptr(), 0, buffer, buffer, 0]
        find_averages(state, p)
        if state["step"].dtype != torch.float32:
            state["step"] = state["step"].float()
        average, square = state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()
        return [p.data_ptr(), 0, average, square, state["step"].data_ptr()]

    def run(self, at: UnitCoordinates, option: Option, grow: Grow, rescaling: Rescaling | None) -> None:
        """One step, after which units are rescaled."""
        ratios = self.ones if rescaling is None else self.measurement.spread(*rescaling).float()
        averaged = [p for n, p in self.parameters.items() if self.norms or n not in self.matrices]
        if averaged:
            foreach("add_", [self.optimizer.state[p]["step"] for p in averaged], 1)
        rate = option(self.all, "lr")
        decay = option(self.all, "weight_decay") if isinstance(self.optimizer, torch.optim.AdamW) else 0.0
        lr = self._by_block(rate * self.ratios)
        decays = self._by_block(rate * decay * torch.ones_like(self.ratios))
        if self.norms is None:
            moved = self._move_matrices(at, lr, ratios)
        else:
            moved = self._move_measured(
                at, self._by_block(rate * self.all.spectral), decays, self.norms, ratios
            )
        other = self._step_adam(at, lr, decays, moved[:, 1], ratios)
        if len(self.turning_index):
            along, old, new = (torch.cat([moved[:, :1], moved[:, 2:]], 1) + other)[self.turning_index].unbind(
                1
            )
            growth = grow(self.turning, along)
            turns = at.turns[self.turning_index] & (old > 0) & (new > 0)
            factors = torch.where(turns, growth * (old / torch.where(turns, new, 1)).sqrt(), 1)
            full = lr.new_ones(len(lr)).index_copy(0, self.turning_index, factors.float())
            tiles = self.turning_tiles
            scale_kernel[tiles.grid](self.pointed, tiles.tiles, full, num_warps=WARPS)

    def _move_matrices(self, at: UnitCoordinates, lr: Tensor, ratios: Tensor) -> Tensor:
        """Muon's step: the sums <h, u>, <h, h>, and <u, u> before and after, by block."""
        if not self.batches:
            return torch.zeros(len(lr), 4, dtype=torch.float64, device=self.device)
        group, tiles = self.optimizer.param_groups[0], self.orthogonal_tiles
        rule = group["momentum"], group["nesterov"]
        momentum = self._launch(momentum_kernel, tiles, 2, at, self.directions, *rule)
        norms = []
        for batch in self.batches:
            batch.copy_(orthogonalize(batch, batch.dtype))
            norm = torch.linalg.vector_norm(batch, dim=(1, 2), dtype=torch.float32)
            norms.append(torch.where(norm > 0, norm, 1) / math.sqrt(batch[0].numel()))
        rates = lr.index_copy(0, self.order, lr[self.order] / torch.cat(norms))
        moved = self._launch(move_kernel, tiles, 2, at, ratios, self.directions, rates)
        return torch.cat([momentum[:, :2], moved[:, :2]], 1)

    def _move_measured(
        self, at: UnitCoordinates, lengths: Tensor, decays: Tensor, norms: SpectralNorms, ratios: Tensor
    ) -> Tensor:
        """Adam's step of matrices, of these spectral norms: the same sums."""
        tiles = self.orthogonal_tiles
        found = self._launch(direction_kernel, tiles, 2, at, self.directions, *self._find_rule())
        norm = norms.find(self.batches)
        lengths = lengths.index_copy(0, self.order, lengths[self.order] / torch.where(norm > 0, norm, 1))
        moved = self._launch(move_kernel, tiles, 2, at, ratios, self.directions, lengths, decays)
        return torch.cat([found[:, :2], moved[:, :2]], 1)

    def _find_rule(self) -> list[float]:
        """What the kernels are told of Adam."""
        group = self.optimizer.param_groups[0]
        averages = [x for beta in group["betas"] for x in (beta, 1 - beta, math.log(max(beta, 1e-300)))]
        return [*averages, group["eps"]]

    def _step_adam(
        self, at: UnitCoordinates, lr: Tensor, decays: Tensor, squares: Tensor, ratios: Tensor
    ) -> Tensor:
        """Adam's step: the sums <h, u>, and <u, u> before and after, by block."""
        if not len(self.other_tiles.numbers):
            return torch.zeros(len(lr), SUMS.value, dtype=torch.float64, device=self.device)
        keeps = torch.ones_like(lr)
        if len(self.gated_tiles.numbers):
            squares = squares + self._launch(norm_kernel, self.gated_tiles, 1, at, True)[:, 0]
            bound = NOISE * torch.finfo(torch.float32).eps
            keeps = (~self.measurement.find_noise(squares.sqrt(), bound)).float()
        return self._launch(
            adam_kernel, self.other_tiles, 3, at, ratios, lr, decays, keeps, *self._find_rule()
        )

    def _launch(self, kernel: Any, tiles: Tiles, count: int, at: UnitCoordinates, *arguments: Any) -> Tensor:
        """The sums that a kernel finds, by block."""
        partial = tiles.make_partial()
        kernel[tiles.grid](
            self.pointed, tiles.tiles, at.factors, at.sizes, partial, *arguments, num_warps=WARPS
        )
        sums = partial.new_zeros(len(self.measurement.blocks), SUMS.value)
        tiles.add_up(partial, sums, count)
        return sums

    def _by_block(self, values: Tensor) -> Tensor:
        """Values of the blocks that move among those of all, in fp32."""
        count = len(self.measurement.blocks)
        return torch.zeros(count, device=self.device).index_copy(0, self.index, values.float())
