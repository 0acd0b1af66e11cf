"""Steps of any parameters whose gammas are measured: one launch for all, or up to three, and no copies."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from pathsgd._torch import is_capturing
from pathsgd.geometry.cuda_graph import CUDAGraph
from pathsgd.geometry.devices import on_device
from pathsgd.geometry.gamma import Gamma, Gammas
from pathsgd.optim.capture_from_start import CapturedCopies
from pathsgd.optim.fused.gpu.multi_tensor_kernel import (
    BLOCK,
    FIELDS,
    OUTER,
    PLAIN,
    STRIDED,
    TOGETHER,
    multi_tensor_kernel,
)
from pathsgd.optim.fused.gpu.recorded_steps import capture_launches
from pathsgd.optim.fused.gpu.triton_rule import OPTIONS, QUICK_FROM, find_method, find_numbers
from pathsgd.optim.rule import GroupRule, Rule, State

ALIGNED = 4 * TOGETHER.value
"""Bytes of one access."""
AXES = 3
"""Those that the kernel knows, once axes that lie one after the other in all tensors are taken as one."""


class NotStrided(ValueError):
    """Tensors that the kernel cannot go over."""


class Row(NamedTuple):
    """How the entries of one parameter are gone over."""

    kind: int
    numel: int
    sizes: tuple[int, ...]
    """Of the three axes."""
    strides: tuple[tuple[int, ...], ...]
    """Over them: of the weight, the gradient, the state and both factors of gamma."""


class MultiTensorStep:
    """Moves these parameters as long as they, their state and their gammas lie where they do.

    Args:
        groups: the parameters and their rules, which are compatible.
        states: of each parameter; the number of steps comes last, if the rule has one.
        gammas: what was measured, kept so that it is not freed.
        gamma_of: of each parameter, its gamma, or None for 1.
        before: the step that was taken before, whose tiles may serve.
        copies: makes those of a step that is being captured in a CUDA graph.

    Raises:
        NotStrided: the kernel cannot go over them.
    """

    def __init__(
        self, groups: Sequence[GroupRule], states: Sequence[State], gammas: Gammas,
        gamma_of: Sequence[Gamma | None], before: MultiTensorStep | None, copies: CapturedCopies,
    ) -> None:  # fmt: skip
        self.parameters = [p for group in groups for p in group.parameters]
        self.device = self.parameters[0].device
        self.groups, self.states, self.gammas = list(groups), list(states), gammas
        self._copies = copies
        self.one = self._place(torch.ones(()))
        moved = [self._find_tensors(*each) for each in zip(self.parameters, states, gamma_of, strict=True)]
        if any(t.dtype != torch.float32 or t.device != self.device for each in moved for t in each):
            raise NotStrided
        self.rows = [_find_row(each) for each in moved]
        self.lengths = [len(group.parameters) for group in groups]
        self.weights = [p.data_ptr() for p in self.parameters]
        self.gradients: list[int]
        self.layouts = self._look_at_gradients()
        self.tiles: dict[int, Tensor]
        """(row, block) of every program, by kind."""
        if before is not None and before.rows == self.rows and not is_capturing():
            self.tiles = before.tiles
        else:
            self.tiles = self._make_tiles()
        self.fields = self._make_fields(moved)
        self.table: Tensor
        """Stays where it is once launches are captured."""
        self._told: tuple[list[int], list[float]] = [], []
        """The addresses of gradients and the rates that the table has."""
        self._launched = False
        self._graph: CUDAGraph | None = None

    def _find_tensors(self, weight: Tensor, state: State, gamma: Gamma | None) -> list[Tensor]:
        """In the order of the table; the weight stands for state that there is not."""
        if weight.grad is None or weight.grad.layout != torch.strided:
            raise NotStrided
        kept = self.groups[0].rule.state_count
        first, second, count = (*state[:kept], weight, weight)[:2] + (*state[kept:], weight)[:1]
        factors = [] if gamma is None else [factor.mantissa for factor in gamma.factors()]
        head, tail = ((*factors, self.one, self.one)[k].expand(weight.shape) for k in (0, 1))
        return [weight, weight.grad, first, second, count, head, tail]

    def _make_tiles(self) -> dict[int, Tensor]:
        found: dict[int, list[Tensor]] = {}
        for k, row in enumerate(self.rows):
            blocks = torch.arange(-(-row.numel // BLOCK.value), dtype=torch.int32)
            found.setdefault(row.kind, []).append(torch.stack([torch.full_like(blocks, k), blocks], 1))
        return {kind: self._place(torch.cat(own)) for kind, own in found.items()}

    def _make_fields(self, moved: Sequence[Sequence[Tensor]]) -> Tensor:
        fields = [
            [*(t.data_ptr() for t in own), 0, 0, row.numel, *row.sizes[1:], *chain(*row.strides)]
            for own, row in zip(moved, self.rows, strict=True)
        ]
        found = torch.tensor(fields, dtype=torch.int64)
        assert found.shape[1] == FIELDS.value
        decays = [group.rule.weight_decay for group in self.groups for _ in group.parameters]
        found.view(torch.float64)[:, 8] = torch.tensor(decays, dtype=torch.float64)
        return found

    def _place(self, values: Tensor) -> Tensor:
        """A copy on the device, for which the host does not wait."""
        if self.device.type == "cpu":
            return values.clone()
        if is_capturing():
            return self._copies.place(values, self.device)
        return values.pin_memory().to(self.device, non_blocking=True)

    def fits(self, groups: Sequence[GroupRule], states: Sequence[State], gammas: Gammas) -> bool:
        """Whether this is the step of these parameters, but for where gradients lie and for rates."""
        parameters = [p for group in groups for p in group.parameters]
        return (
            gammas is self.gammas
            and [len(group.parameters) for group in groups] == self.lengths
            and all(_moves_alike(a.rule, b.rule) for a, b in zip(groups, self.groups, strict=True))
            and all(map(operator.is_, parameters, self.parameters))
            and all(map(operator.is_, chain(*states), chain(*self.states)))
            and [p.data_ptr() for p in parameters] == self.weights
            and self._look_at_gradients() == self.layouts
        )

    def _look_at_gradients(self) -> list[object]:
        """What must not change of them. Where they lie may: :attr:`gradients`."""
        grads = [p.grad for p in self.parameters]
        if any(g is None or g.layout is not torch.strided for g in grads):
            return []
        self.gradients = [g.data_ptr() for g in grads]  # type: ignore[union-attr]
        unaligned = [address % ALIGNED for address in self.gradients]
        return [[(g.stride(), g.dtype) for g in grads], unaligned]  # type: ignore[union-attr]

    def step(self, groups: Sequence[GroupRule]) -> None:
        """One step by these rules."""
        with on_device(self.device):
            self._point(groups)
            if is_capturing() or not self._launched or self.device.type != "cuda":
                self._launch()
                self._launched = True  # the kernels are compiled
            else:
                # Nothing that they are launched with changes: what does is in the table.
                self._graph = self._graph or capture_launches(self._launch, self.device)
                self._graph.replay()
        torch.autograd.graph.increment_version(self.parameters)  # as torch does when it writes

    def _launch(self) -> None:
        rule = self.groups[0].rule
        decay = rule.decay if any(group.rule.weight_decay for group in self.groups) else "none"
        for kind, tiles in self.tiles.items():
            multi_tensor_kernel[(len(tiles),)](
                self.table, tiles, *find_numbers(rule), KIND=kind, METHOD=find_method(rule),
                NESTEROV=rule.nesterov, DECAY=decay, MAXIMIZE=rule.maximize,
                QUICK=rule.eps >= QUICK_FROM, **OPTIONS,
            )  # fmt: skip

    def _point(self, groups: Sequence[GroupRule]) -> None:
        """Tells the kernel where gradients lie, and the rates."""
        rates = [0.0 if isinstance(rule.lr, Tensor) else float(rule.lr) for rule, _ in groups]
        capturing = is_capturing()
        if capturing or (self.gradients, rates) != self._told:
            self.fields[:, 1] = torch.tensor(self.gradients)
            if rates != self._told[1]:
                by_row = [rate for rate, n in zip(rates, self.lengths, strict=True) for _ in range(n)]
                self.fields.view(torch.float64)[:, 7] = torch.tensor(by_row, dtype=torch.float64)
            if self._graph is not None and not capturing:
                self.table.copy_(self.fields.pin_memory(), non_blocking=True)
            else:  # what the user captures has a table of its own
                self.table, self._graph = self._place(self.fields), None
            self._told = ([], []) if capturing else (self.gradients, rates)
        start = 0
        for group in groups:
            stop = start + len(group.parameters)
            if isinstance(group.rule.lr, Tensor):
                self.table.view(torch.float64)[start:stop, 7] = group.rule.lr
            start = stop


def _moves_alike(one: Rule, other: Rule) -> bool:
    return one.is_compatible(other) and one.weight_decay == other.weight_decay


def _find_row(moved: Sequence[Tensor]) -> Row:
    weight, grad, first, second, _, head, tail = moved
    if first.stride() != second.stride() and second is not weight:
        raise NotStrided
    tensors = weight, grad, first, head, tail
    axes = _merge(weight.shape, [t.stride() for t in tensors])
    if len(axes) > AXES or any(_extent(axes, k) >= 1 << 31 for k in range(len(tensors))):
        raise NotStrided
    axes = [(1, (0,) * len(tensors))] * (AXES - len(axes)) + axes
    sizes, by_axis = tuple(n for n, _ in axes), [strides for _, strides in axes]
    columns, together = sizes[-1], TOGETHER.value
    kind = STRIDED
    if columns % together == 0 and not any(map(_is_unaligned, (*moved[:4], head))):
        if by_axis == [(0,) * 5, (0,) * 5, (1, 1, 1, 1, 0)]:
            kind = PLAIN
        elif by_axis == [(0,) * 5, (columns,) * 3 + (1, 0), (1, 1, 1, 0, 1)] and not _is_unaligned(tail):
            kind = OUTER
    return Row(kind.value, weight.numel(), sizes, tuple(zip(*by_axis, strict=True)))


def _is_unaligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % ALIGNED != 0


Axis = tuple[int, tuple[int, ...]]
"""Its size, and the stride of every tensor over it."""


def _merge(shape: torch.Size, strides: Sequence[tuple[int, ...]]) -> list[Axis]:
    """The axes in the order in which the first tensor lies, those that are one in all tensors as one."""
    found: list[Axis] = []
    for d in sorted((d for d, n in enumerate(shape) if n != 1), key=lambda d: -strides[0][d]):
        own = tuple(stride[d] for stride in strides)
        if found and found[-1][1] == tuple(shape[d] * stride for stride in own):
            found[-1] = found[-1][0] * shape[d], own
        else:
            found.append((shape[d], own))
    return found


def _extent(axes: Sequence[Axis], k: int) -> int:
    return max(math.prod(n for n, _ in axes), 1 + sum((n - 1) * strides[k] for n, strides in axes))
