"""The formula of a step in torch operations; fused/gpu/triton_rule.py has it once more, in Triton.

Path-SGD with momentum and decoupled decay, in the invariant coordinates ``z = w sqrt(gamma)``:

    h = g / sqrt(gamma)                               the gradient of z
    b = momentum b + h
    u = h + momentum b  with Nesterov, else b
    w = (1 - lr weight_decay) w - lr u / sqrt(gamma)

Without momentum that is the paper's ``w - lr g / gamma``. For AdaGrad and Adam, u is torch's own update of h:
see :mod:`pathsgd.optim.fused.torch_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pathsgd import _torch
from pathsgd.geometry.extended_float import exact_ldexp

Method = Literal["sgd", "adagrad", "adam"]
Decay = Literal["all", "live", "coupled"]
State = tuple[Tensor, ...]
Rate = float | Tensor


@dataclass(frozen=True)
class Rule:
    """The numbers of a step."""

    lr: Rate
    method: Method = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    lr_decay: float = 0.0
    step: float | Tensor = 1.0
    """Which step this is, from 1; on a GPU it may be a tensor."""
    weight_decay: float = 0.0
    decay: Decay = "all"
    """Decay shrinks ``"all"`` weights or only ``"live"`` ones (gamma > 0), as a decay of z would; or it is
    ``"coupled"``, part of h."""
    maximize: bool = False
    p: float = 2

    @property
    def state_count(self) -> int:
        """Numbers of state for each weight."""
        return {"sgd": int(self.momentum != 0), "adagrad": 1, "adam": 2}[self.method]

    @property
    def coupled_decay(self) -> float:
        return self.weight_decay if self.decay == "coupled" else 0.0

    @property
    def decoupled_decay(self) -> float:
        return 0.0 if self.decay == "coupled" else self.weight_decay

    def is_compatible(self, other: Rule) -> bool:
        """Whether one kernel can move by both: groups may differ in lr, decay and step count."""
        return self is other or all(getattr(self, name) == getattr(other, name) for name in COMMON)


class GroupRule(NamedTuple):
    """Parameters that move by one rule."""

    rule: Rule
    parameters: list[Tensor]


COMMON = ("method", "momentum", "nesterov", "betas", "eps", "lr_decay", "decay", "maximize", "p")


class InvariantCoordinates(Protocol):
    """The maps between w and z of one tensor: a :class:`pathsgd.Gamma`, or a block of one."""

    @property
    def dtype(self) -> torch.dtype: ...

    def gradient_to_z(self, gradient: Tensor) -> Tensor: ...

    def step_from_z(self, step: Tensor) -> Tensor: ...

    @property
    def stored(self) -> bool:
        """Whether the root of every entry is, or it is made each time."""

    def inverse_root(self) -> tuple[Tensor, Tensor | None]:
        """``1 / sqrt(gamma)`` of every entry as (root, n) for ``root * 2^-n``."""


# One operation on each tensor of a list, by the name of torch's method. The formula is written with these, so
# that one text serves in-place updates, torch's multi-tensor kernels and torch.func, which writes nothing.

Each = Callable[..., list[Tensor]]


def single_tensor(operation: str, tensors: Sequence[Tensor], *others: Any, **options: Any) -> list[Tensor]:
    """Tensor by tensor; names that end in an underscore write in place, as in torch."""

    def pick(other: Any, k: int) -> Any:
        return other[k] if isinstance(other, (list, tuple)) else other

    return [
        getattr(tensor, operation)(*(pick(other, k) for other in others), **options)
        for k, tensor in enumerate(tensors)
    ]


def multi_tensor(operation: str, tensors: Sequence[Tensor], *others: Any, **options: Any) -> list[Tensor]:
    """All tensors in few kernel launches."""
    if not tensors:
        return []
    found = _torch.foreach(operation, list(tensors), *others, **options)
    return list(tensors) if operation.endswith("_") else list(found)


def out_of_place(operation: str, tensors: Sequence[Tensor], *others: Any, **options: Any) -> list[Tensor]:
    """Tensor by tensor, and nothing is overwritten."""
    return single_tensor(operation.rstrip("_"), tensors, *others, **options)


# The formula. ``None`` in place of coordinates means gamma = 1.


def gradients_to_z(
    grads: Sequence[Tensor], gammas: Sequence[InvariantCoordinates | None], each: Each
) -> list[Tensor]:
    """``h = g / sqrt(gamma)``, in the precision of gamma."""
    found = [g if gamma is None else g.to(gamma.dtype) for g, gamma in zip(grads, gammas, strict=True)]
    stored: dict[int, Tensor] = {}
    for k, gamma in enumerate(gammas):
        if gamma is None:
            continue
        root, exponent = gamma.inverse_root() if gamma.stored else (None, None)
        if root is None or exponent is not None:
            found[k] = gamma.gradient_to_z(found[k])
        else:
            stored[k] = root
    products = each("mul", [found[k] for k in stored], list(stored.values()))
    for k, product in zip(stored, products, strict=True):
        found[k] = product
    return found


def apply_momentum(
    hs: list[Tensor], buffers: list[Tensor], momentum: float, nesterov: bool, each: Each
) -> tuple[list[Tensor], list[Tensor]]:
    """``(u, b)`` from h and the momentum buffers ``b``."""
    if not momentum:
        return hs, buffers
    buffers = each("mul_", buffers, momentum)
    buffers = each("add_", buffers, hs)
    return each("add", hs, buffers, alpha=momentum) if nesterov else buffers, buffers


def apply_steps(
    weights: Sequence[Tensor],
    us: Sequence[Tensor],
    gammas: Sequence[InvariantCoordinates | None],
    rates: Sequence[Rate],
    weight_decay: float,
    each: Each,
) -> list[Tensor]:
    """``(1 - rate weight_decay) w - rate u / sqrt(gamma)``."""
    found = list(weights)
    if weight_decay:
        found = each("mul_", found, [1 - rate * weight_decay for rate in rates])
    together: dict[tuple[float, bool], list[tuple[int, Tensor, Tensor]]] = {}
    for k, (weight, u, gamma, rate) in enumerate(zip(found, us, gammas, rates, strict=True)):
        mixed = weight.dtype != u.dtype or (gamma is not None and weight.dtype != gamma.dtype)
        if mixed or isinstance(rate, Tensor):
            step = rate * (u if gamma is None else gamma.step_from_z(u))
            (found[k],) = each("sub_", [weight], [step.to(weight.dtype)])
            continue
        if gamma is None:
            together.setdefault((rate, True), []).append((k, u, u))
            continue
        root, exponent = gamma.inverse_root()
        if exponent is not None:  # exact, so that a rescaled copy in plain floats takes the same step
            u = exact_ldexp(u, -exponent)
        if gamma.stored:
            together.setdefault((rate, False), []).append((k, u, root))
        else:
            (found[k],) = each("addcmul_", [weight], [u], [root], value=-rate)
    for (rate, plain), own in together.items():
        ws, moved, roots = [found[k] for k, _, _ in own], [u for _, u, _ in own], [root for _, _, root in own]
        new = (
            each("add_", ws, moved, alpha=-rate) if plain else each("addcmul_", ws, moved, roots, value=-rate)
        )
        for (k, _, _), weight in zip(own, new, strict=True):
            found[k] = weight
    return found
