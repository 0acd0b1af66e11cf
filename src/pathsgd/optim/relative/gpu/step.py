"""A relative step of Muon or AdamW by kernels: the formula of view.py, muon.py, spectral.py and growth.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach, has_step_hooks, is_capturing
from pathsgd.geometry.cuda_graph import free_after_capture
from pathsgd.optim.relative.coordinates import BlockSubset
from pathsgd.optim.relative.gpu.kernels import (
    SUMS,
    WARPS,
    adam_kernel,
    direction_kernel,
    grow_kernel,
    momentum_kernel,
    move_kernel,
    norm_kernel,
    normalize_kernel,
    scale_kernel,
    square_kernel,
)
from pathsgd.optim.relative.gpu.layout import Tiles
from pathsgd.optim.relative.gpu.measurement import UnitCoordinates, UnitMeasurement
from pathsgd.optim.relative.gpu.spectral_norms import SpectralNorms
from pathsgd.optim.relative.growth import NOISE, find_state
from pathsgd.optim.relative.muon import (
    RelativeMuon,
    choose_dtype,
    find_averages,
    find_momentum,
    is_orthogonal,
    iterate,
    make_diagonal,
)
from pathsgd.optim.relative.unit_scales import Rescaling

OPTIONS = ("momentum", "nesterov", "betas", "eps")
"""Those that cannot differ between groups here."""

ADDRESSES = (0, 1, 2, 3, 4, 14)
"""The fields that have them."""

Option = Callable[[BlockSubset, str], "float | Tensor"]


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
    if grad is None or grad.layout != torch.strided or grad.dtype != p.dtype:
        return False
    # torch.compile gives 1x1 convolutions strides of its own along the axes of size 1.
    strides = zip(p.shape, p.stride(), grad.stride(), strict=True)
    return all(n == 1 or own == other for n, own, other in strides)


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
        moved = [k for k, block in enumerate(blocks) if block.name in parameters]
        matrices = [k for k in moved if blocks[k].name in self.matrices]
        others = [k for k in moved if blocks[k].name not in self.matrices]
        # Families in which a gradient may be rounding beside another's.
        gated = {blocks[k].family for k in others if not blocks[k].turns}
        self.matrix_tiles, self.other_tiles = layout.choose(matrices), layout.choose(others)
        self.gated_tiles = layout.choose([k for k in others if blocks[k].family in gated])
        self.turning_tiles = layout.choose([k for k in moved if blocks[k].turns])
        self.all = measurement.subset(measurement.names, self.device)
        chosen = set(matrices if muon else ())
        # Muon moves a matrix by its direction, which has root mean square 1.
        norms = [math.sqrt(block.numel) if k in chosen else 1.0 for k, block in enumerate(blocks)]
        ratios = [ratio * norm for ratio, norm in zip(self.all.ratios, norms, strict=True)]
        self.ratios = torch.tensor(ratios, device=self.device)
        self.ratios_and_ones = torch.stack([self.ratios, torch.ones_like(self.ratios)])
        self.scales = torch.ones_like(self.ratios)
        self._sums: dict[Any, Tensor] = {}
        self.fields = layout.fields.clone()
        self.pieces = [piece for k in moved for piece in layout.pieces_of[k]]
        dtype = torch.bfloat16 if muon and self.device.type == "cuda" else torch.float32
        self.directions, batches = self._place_directions(matrices, dtype)
        dtype = choose_dtype(self.directions) if muon else dtype
        self.normalized = self.directions.view(dtype)
        """In the same place."""
        self.batches = [batch.view(dtype) for batch in batches]
        measured = {n: p for n, p in parameters.items() if n in self.matrices and not muon}
        self.norms: SpectralNorms | None = None
        if measured:
            begins = {k: int(self.fields[layout.pieces_of[k][0], 12]) for k in matrices}
            self.norms = SpectralNorms(optimizer, measured, measurement, self.directions, begins)
        diagonals = {min(batch.shape[1:]): make_diagonal(batch) for batch in self.batches if muon}
        self.diagonals = [diagonals[min(batch.shape[1:])] for batch in self.batches if muon]
        self.no_rescaling = torch.ones(len(layout.heads), device=self.device)
        counts = [len(measurement.by_name[name]) for name in measurement.names]
        block_of = self.fields[:, 13]
        self.fields[:, 15] = torch.tensor([count for count in counts for _ in range(count)])[block_of]
        self.pointed = self.fields.to(self.device)
        number = {name: k for k, name in enumerate(names)}
        self._parameter_of = torch.tensor([number[layout.names[piece]] for piece in self.pieces])
        offsets = torch.tensor([layout.offsets[piece] for piece in self.pieces])
        self._bytes = 4 * offsets[:, None] * torch.tensor([1, 1, 1, 1, 0, 0])
        self._bytes[:, 5] = (
            8 * torch.tensor([k for count in counts for k in range(count)])[block_of[self.pieces]]
        )
        self._addresses: list[list[int]] = []
        self._gradients: list[int] = []
        self._spare = self._make_room()
        self._captured: list[Tensor] = []
        free_after_capture(self, self._captured)

    def _make_room(self) -> Tensor:
        return torch.empty(self.fields.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _place_directions(self, matrices: list[int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """All directions in one list, and those of each shape as a batch of matrices."""
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
        return directions, [
            directions[first : first + math.prod(shape)].view(shape) for first, *shape in batches
        ]

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
        fields.copy_(self.fields)
        fields[torch.tensor(self.pieces)[:, None], torch.tensor(ADDRESSES)] = found + self._bytes
        self.pointed.copy_(fields, non_blocking=True)
        if capturing:
            self._captured.append(fields)  # a replay copies it again
        # The room is the copy's until it has happened; torch's host allocator knows when.
        self._spare = self._make_room()

    def _find_tensors(self, name: str, p: Tensor) -> list[int]:
        """The addresses of weight, (gradient,) state, number of steps and growth; state is made at the first
        step."""
        state = self.optimizer.state[p]
        blocks = self.measurement.by_name[name]
        growth = find_state(state, p, len(blocks)).data_ptr() if blocks[0].turns else 0
        if name in self.matrices and self.norms is None:
            buffer = find_momentum(state, p).data_ptr()
            return [p.data_ptr(), 0, buffer, buffer, 0, growth]
        find_averages(state, p)
        if state["step"].dtype != torch.float32:
            state["step"] = state["step"].float()
        average, square = state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()
        return [p.data_ptr(), 0, average, square, state["step"].data_ptr(), growth]

    def run(
        self, at: UnitCoordinates, option: Option, growth: float, rescaling: Rescaling | None = None
    ) -> None:
        """One step, after which units are rescaled."""
        ratios = self.no_rescaling if rescaling is None else self.measurement.spread(*rescaling).float()
        averaged = [p for n, p in self.parameters.items() if self.norms or n not in self.matrices]
        if averaged:
            foreach("add_", [self.optimizer.state[p]["step"] for p in averaged], 1)
        rate, decay = option(self.all, "lr"), option(self.all, "weight_decay")
        rates, lr = (rate * self.ratios_and_ones).float().unbind()
        decays = (decay * self.ratios_and_ones[1]).float()
        # AdamW's own, which the turn takes back: norms decay when they grow.
        own_decays = lr * decays if isinstance(self.optimizer, torch.optim.AdamW) else torch.zeros_like(lr)
        if self.norms is None:
            found, moved = self._move_orthogonal(at, rates, ratios)
        else:
            lengths = (rate * self.all.spectral).float()
            found, moved = self._move_measured(at, lengths, own_decays, self.norms, ratios)
        other = self._step_adam(at, rates, own_decays, found[:, 1], ratios)
        tiles = self.turning_tiles
        if len(tiles.numbers):
            grow_kernel[len(tiles.numbers),](
                self.pointed, tiles.tiles, tiles.firsts, found, moved, other, at.turns, at.catch_up,
                self.all.shares, lr, decays, growth, self.scales, num_warps=1,
            )  # fmt: skip
            scale_kernel[tiles.grid](self.pointed, tiles.tiles, self.scales, num_warps=WARPS)
        torch.autograd.graph.increment_version(list(self.parameters.values()))  # as torch does when it writes

    def _move_orthogonal(self, at: UnitCoordinates, rates: Tensor, ratios: Tensor) -> tuple[Tensor, Tensor]:
        """Muon's step: the sums <h, u> and <h, h>, and <u, u> before and after, by block."""
        if not self.batches:
            return self._find_sums(momentum_kernel), self._find_sums(move_kernel)
        group, tiles = self.optimizer.param_groups[0], self.matrix_tiles
        rule = group["momentum"], group["nesterov"]
        momentum = self._launch(momentum_kernel, tiles, 3, at, self.directions, *rule)
        normalize_kernel[tiles.grid](
            self.pointed, tiles.tiles, momentum[:, 2:], self.directions, self.normalized, num_warps=WARPS
        )
        for batch, diagonal in zip(self.batches, self.diagonals, strict=True):
            iterate(batch, diagonal, out=batch)
        squares = self._launch(square_kernel, tiles, 1, at, self.normalized)
        return momentum, self._launch(move_kernel, tiles, 2, at, ratios, self.normalized, rates, squares)

    def _move_measured(
        self, at: UnitCoordinates, lengths: Tensor, decays: Tensor, norms: SpectralNorms, ratios: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adam's step of matrices, of these spectral norms: the same sums."""
        tiles = self.matrix_tiles
        found = self._launch(direction_kernel, tiles, 2, at, self.directions, *self._find_rule())
        lengths = lengths / norms.find()
        return found, self._launch(move_kernel, tiles, 2, at, ratios, self.directions, lengths, None, decays)

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
            return self._find_sums(adam_kernel)
        keeps = torch.ones_like(lr)
        if len(self.gated_tiles.numbers):
            squares = squares + self._launch(norm_kernel, self.gated_tiles, 1, at, True)[:, 0]
            bound = NOISE * torch.finfo(torch.float32).eps
            keeps = (~self.measurement.find_noise(squares.sqrt(), bound)).float()
        return self._launch(
            adam_kernel, self.other_tiles, 4, at, ratios, lr, decays, keeps, *self._find_rule()
        )

    def _launch(self, kernel: Any, tiles: Tiles, count: int, at: UnitCoordinates, *arguments: Any) -> Tensor:
        """The sums that a kernel finds, by block."""
        partial = tiles.make_partial()
        kernel[tiles.grid](
            self.pointed, tiles.tiles, at.factors, at.sizes, partial, *arguments, num_warps=WARPS
        )
        sums = self._find_sums(kernel)
        tiles.add_up(partial, sums, count)
        return sums

    def _find_sums(self, kernel: Any) -> Tensor:
        """Room for a kernel's sums, made once: those of blocks that it does not go over stay zero."""
        if kernel not in self._sums:
            shape = len(self.measurement.blocks), SUMS.value
            self._sums[kernel] = torch.zeros(shape, dtype=torch.float64, device=self.device)
        return self._sums[kernel]
