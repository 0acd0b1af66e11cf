"""What every implementation computes: one linear layer's update and its share of the next gamma.

With ``gamma_in`` one number per column and ``gamma_out`` one per row of W, before the power 2/p:

    s = gamma_out^(-1/p) gamma_in^(-1/p)          the inverse root of gamma, an outer product
    w, state = moved(w, g, state, s)              see rule.py; the bias likewise, with gamma_in = 1
    next gamma_in  of the rows    = sum over columns of |w|^p (next gamma_in of the columns) + |bias|^p
    next gamma_out of the columns = sum over rows of |w|^p (next gamma_out of the rows)

So the layer is read once and written once, and what the next step needs falls out of the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pathsgd.optim.fused.exponent_frame import Frame
from pathsgd.optim.rule import Rule, State


@dataclass(frozen=True)
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


Launch = Callable[[Sequence[LayerTensors]], None]
"""Calls ``update``, ``sums`` and ``finish`` for all layers of a step."""


class Implementation(Protocol):
    """Keeps the gammas of one chain on its device and updates its layers.

    ``into[k]`` belongs to the inputs of layer k and ``out[k]`` to its outputs. ``update`` uses those of the
    last ``finish`` to move layer k, and may be asked for the next ``into[k + 1]`` (if the next ``into[k]``
    is known) and the next ``out[k - 1]`` (if the next ``out[k]`` is).
    """

    dtype: torch.dtype
    """Of the gammas."""

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor], frame: Frame | None = None) -> None:
        """Takes gammas that were measured, in a frame of exponents (all 0 if none is given)."""

    def run(self, layers: Sequence[LayerTensors], launch: Launch) -> None:
        """A whole step: ``launch(layers)``, which calls what follows, or something that comes to the same."""

    def update(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        """Moves layer k and sums what was asked for from its new weights."""

    def sums(self, k: int, layer: LayerTensors, *, into: bool, out: bool) -> None:
        """The same sums from weights that were moved before."""

    def aside(self) -> AbstractContextManager[None]:
        """What is launched inside may run beside what is launched after, up to ``join``."""

    def join(self) -> None:
        """Waits for what was launched aside."""

    def finish(self) -> None:
        """The next gammas become the current ones."""

    def in_range(self) -> bool:
        """Whether plain floats are enough for these gammas; on a GPU this waits."""

    def trusted(self) -> bool:
        """Whether plain floats are still enough for these gammas, as far as is known without waiting."""
