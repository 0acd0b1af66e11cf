"""The formula of a step in torch operations.

Path-SGD with momentum and decoupled decay, in the invariant coordinates ``z = w sqrt(gamma)``:

    h = g / sqrt(gamma)                               the gradient of z
    b = momentum b + h
    u = h + momentum b  with Nesterov, else b
    w = (1 - lr weight_decay) w - lr u / sqrt(gamma)

Without momentum that is the paper's ``w - lr g / gamma``. ``paths/blocked.py`` and ``paths/kernels.py`` say
the same for chains of linear layers, in blocks and in Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pathsgd.geometry.gamma import Gamma


def find_step(
    weight: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    gamma: Gamma | None,
    *,
    lr: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
) -> tuple[Tensor, Tensor | None]:
    """The new weight and the new momentum. Nothing is written.

    Args:
        weight: of any precision.
        gradient: of the same shape.
        buffer: the momentum of h, None at first.
        gamma: None for 1.
        lr: step size.
        momentum: its factor, on h.
        nesterov: Nesterov momentum.
        weight_decay: decoupled weight decay.
        maximize: whether to go upwards.
    """
    gradient = -gradient if maximize else gradient
    dtype = torch.promote_types(weight.dtype, torch.float32)
    h = gradient.to(dtype) if gamma is None else gamma.gradient_to_z(gradient)
    u = h
    if momentum:
        buffer = h if buffer is None else momentum * buffer + h
        u = h + momentum * buffer if nesterov else buffer
    lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
    step = u if gamma is None else gamma.step_from_z(u)
    moved = (1 - lr * weight_decay) * weight if weight_decay else weight
    return (moved - lr * step).to(weight.dtype), buffer
