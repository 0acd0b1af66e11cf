"""What every fused implementation computes: one linear layer's update and its share of the next gamma.

With ``gamma_in`` one number per column and ``gamma_out`` one per row of W, before the power 2/p:

    1 / sqrt(gamma) = gamma_out^(-1/p) gamma_in^(-1/p)      an outer product
    w, state = update(w, g, state, 1 / sqrt(gamma))         rule.py; the bias likewise, with gamma_in = 1
    next gamma_in  of the rows    = sum over columns of |w|^p (next gamma_in of the columns) + |bias|^p
    next gamma_out of the columns = sum over rows of |w|^p (next gamma_out of the rows)

So the layer is read once and written once, and the same pass gives what the next step needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pathsgd.optim.fused.exponent_frame import ExponentFrame
from pathsgd.optim.rule import Rule, State


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's parameters with what moves them."""

    rule: Rule
    bias_rule: Rule
    weight: Tensor
    weight_grad: Tensor
    weight_state: State = ()
    bias: Tensor | None = None
    bias_grad: Tensor | None = None
    bias_state: State = ()

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        return self.weight.shape[1]


class OptimizerState(Protocol):
    """What an optimizer keeps for its parameters."""

    def tensors(self, parameter: Tensor) -> State:
        """The state of a parameter in the order of its rule; made at its first step."""

    def count(self, parameter: Tensor) -> Tensor:
        """The number of its steps, on its device; for rules that have a step."""

    def count_next(self, rule: Rule, parameters: Sequence[Tensor]) -> list[Rule]:
        """The rule of each parameter's next step."""


Launch = Callable[[Sequence[LayerTensors]], None]
"""Calls ``update``, ``sum_powers`` and ``finish`` for all layers of a step."""


class Implementation(Protocol):
    """Keeps the gammas of one chain on its device and updates its layers.

    ``into[k]`` is gamma_in of the inputs of layer k and ``out[k]`` gamma_out of its outputs. ``update`` moves
    layer k by those of the last ``finish``. It also sums the next ``into[k + 1]``, if the next ``into[k]`` is
    known, and the next ``out[k - 1]``, if the next ``out[k]`` is.
    """

    dtype: torch.dtype
    """Of the gammas."""

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor], frame: ExponentFrame) -> None:
        """Takes measured gammas, in a frame of exponents."""

    def run(self, layers: Sequence[LayerTensors], launch: Launch) -> None:
        """A whole step: ``launch(layers)``, or the replay of one."""

    def update(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        """Moves layer k and computes the requested sums from its new weights."""

    def sum_powers(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        """The same sums, from weights that were moved before."""

    def on_device(self) -> AbstractContextManager[None]:
        """What is launched inside, apart from ``run``, is launched on the device of the chain."""

    def side_stream(self) -> AbstractContextManager[None]:
        """What is launched inside may run beside what is launched after it, up to ``join``."""

    def join(self) -> None:
        """Waits for the side stream."""

    def finish(self) -> None:
        """The next gammas become the current ones."""

    def in_range(self, wait: bool = True) -> bool:
        """Whether plain floats are enough for these gammas; without waiting, as far as the host knows."""
