"""What is done to a weight in a step: SGD, Adagrad or Adam in the coordinates z = w sqrt(gamma).

With ``s`` the inverse root of gamma, so that ``h = g s`` is the gradient of z:

    h = g s  (+ decay w / s, where the decay is coupled to the gradient)
    u = b,             b = momentum b + h                                           SGD
    u = h / (sqrt(v) + eps),           v = v + h^2                                  Adagrad
    u = m / (sqrt(v / c) + eps),       m = b1 m + (1 - b1) h,  v = b2 v + (1 - b2) h^2    Adam
    w = (1 - lr decay) w - rate u s

Every implementation follows :func:`moved`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Method = Literal["sgd", "adagrad", "adam"]
Decay = Literal["all", "live", "coupled"]
State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rule:
    """The numbers of a step."""

    lr: float | Tensor
    method: Method = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    lr_decay: float = 0.0
    step: float | Tensor = 1.0
    """Which step this is, from 1; a tensor on a GPU may hold it."""
    weight_decay: float = 0.0
    decay: Decay = "all"
    """``"all"`` weights shrink, or only the ``"live"`` ones, as z does; or it is ``"coupled"``, part of h."""
    maximize: bool = False
    p: float = 2

    @property
    def states(self) -> int:
        """Numbers kept for each weight."""
        return {"sgd": int(self.momentum != 0), "adagrad": 1, "adam": 2}[self.method]

    @property
    def coupled(self) -> float:
        return self.weight_decay if self.decay == "coupled" else 0.0

    @property
    def sign(self) -> float:
        return -1.0 if self.maximize else 1.0

    def rate(self) -> float | Tensor:
        if self.method == "adagrad":
            return self.lr / (1 + (self.step - 1) * self.lr_decay)
        if self.method == "adam":
            return self.lr / (1 - self.betas[0] ** self.step)
        return self.lr

    def correction(self) -> float | Tensor:
        """What sqrt(v) of Adam is multiplied by."""
        return (1 - self.betas[1] ** self.step) ** -0.5 if self.method == "adam" else 1.0

    def shrink(self) -> float | Tensor:
        """What a weight is multiplied by, or if ``decay`` is ``"live"`` a weight that is on a path."""
        return 1.0 if self.decay == "coupled" else 1 - self.lr * self.weight_decay

    def goes_with(self, other: Rule) -> bool:
        """Whether both can move parts of one chain: groups may differ in lr, decay and steps taken."""
        return self is other or all(getattr(self, name) == getattr(other, name) for name in SHARED)


SHARED = ("method", "momentum", "nesterov", "betas", "eps", "lr_decay", "decay", "maximize", "p")


def moved(weight: Tensor, grad: Tensor, state: State, scale: Tensor, rule: Rule) -> tuple[Tensor, State]:
    """(new weight, new state), in the dtype of ``scale``."""
    w, h = weight.to(scale.dtype), rule.sign * grad.to(scale.dtype) * scale
    live = scale > 0
    if rule.coupled:
        h = h + rule.coupled * torch.where(live, w / scale, 0)
    state = tuple(s.to(scale.dtype) for s in state)
    u, state = _direction(h, state, rule)
    shrink = rule.shrink()
    w = torch.where(live, w * shrink, w) if rule.decay == "live" else w * shrink
    return w - rule.rate() * (u * scale), state


def _direction(h: Tensor, state: State, rule: Rule) -> tuple[Tensor, State]:
    if rule.method == "adagrad":
        v = state[0] + h * h
        return h / (v.sqrt() + rule.eps), (v,)
    if rule.method == "adam":
        first, second = rule.betas
        m = first * state[0] + (1 - first) * h
        v = second * state[1] + (1 - second) * (h * h)
        return m / (v.sqrt() * rule.correction() + rule.eps), (m, v)
    if not state:
        return h, ()
    b = rule.momentum * state[0] + h
    return h + rule.momentum * b if rule.nesterov else b, (b,)


def powered(w: Tensor, p: int) -> Tensor:
    """``|w|^p`` for p = 1, 2, 4."""
    if p == 1:
        return w.abs()
    return w * w if p == 2 else (w * w) * (w * w)


def inverse_root(x: Tensor, p: int) -> Tensor:
    """``x^(-1/p)``, and 0 for a dead unit."""
    root = x if p == 1 else x.sqrt() if p == 2 else x.sqrt().sqrt()
    return torch.where(root > 0, 1 / root, 0)
