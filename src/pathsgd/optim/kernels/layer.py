"""What every implementation computes: one linear layer's update and its share of the next gamma.

With ``gamma_in`` one number per column and ``gamma_out`` one per row of W, before the power 2/p:

    s = gamma_out^(-1/p) gamma_in^(-1/p)          the inverse root of gamma, an outer product
    h = g s;  b = momentum b + h                  in invariant coordinates
    w = (1 - lr decay) w - lr b s                 and the bias likewise, with gamma_in = 1
    next gamma_in  of the rows    = sum over columns of |w|^p (next gamma_in of the columns) + |bias|^p
    next gamma_out of the columns = sum over rows of |w|^p (next gamma_out of the rows)

So the layer is read once and written once, and what the next step needs falls out of the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """The numbers of a step."""

    lr: float | Tensor
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False
    p: float = 2

    def goes_with(self, other: Rule) -> bool:
        """Whether both can move parts of one chain: groups may differ in lr and decay."""
        return replace(self, lr=0.0, weight_decay=0.0) == replace(other, lr=0.0, weight_decay=0.0)


@dataclass(frozen=True)
class LayerTensors:
    """One layer's parameters with what moves them. Momentum is None where there is none."""

    rule: Rule
    bias_rule: Rule
    weight: Tensor
    weight_grad: Tensor
    weight_momentum: Tensor | None = None
    bias: Tensor | None = None
    bias_grad: Tensor | None = None
    bias_momentum: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        return self.weight.shape[1]


class Implementation(Protocol):
    """Keeps the gammas of one chain on its device and updates its layers.

    ``into[k]`` belongs to the inputs of layer k and ``out[k]`` to its outputs. ``update`` uses those of the
    last ``finish`` to move layer k, and may be asked for the next ``into[k + 1]`` (if the next ``into[k]``
    is known) and the next ``out[k - 1]`` (if the next ``out[k]`` is).
    """

    def start(self, into: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Takes gammas that were measured."""

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

    def trusted(self) -> bool:
        """Whether plain floats are still enough for these gammas, as far as is known without waiting."""


def powered(w: Tensor, p: int) -> Tensor:
    """``|w|^p`` for p = 1, 2, 4."""
    if p == 1:
        return w.abs()
    return w * w if p == 2 else (w * w) * (w * w)


def inverse_root(x: Tensor, p: int) -> Tensor:
    """``x^(-1/p)``, and 0 for a dead unit."""
    root = x if p == 1 else x.sqrt() if p == 2 else x.sqrt().sqrt()
    return torch.where(root > 0, 1 / root, 0)


def moved(
    weight: Tensor, grad: Tensor, momentum: Tensor | None, scale: Tensor, rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """(new weight, new momentum) by the formulas above, in the dtype of ``scale``."""
    h = grad.to(scale.dtype) * scale
    if rule.maximize:
        h = -h
    if momentum is not None:
        momentum = rule.momentum * momentum + h
        h = h + rule.momentum * momentum if rule.nesterov else momentum
    decayed = weight.to(scale.dtype) * (1 - rule.lr * rule.weight_decay)
    return decayed - rule.lr * (h * scale), momentum
