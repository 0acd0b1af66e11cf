"""AdamW, for a whole model and for the parameters that another optimizer leaves over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def adamw(model: nn.Module, lr: float = 1e-3, weight_decay: float = 0.01) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) with torch's defaults."""
    return adamw_of(list(model.parameters()), lr, weight_decay)


def adamw_of(
    params: Sequence[nn.Parameter], lr: float, weight_decay: float, **options: Any
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        by_dimension(params, weight_decay), lr, fused=True, capturable=params[0].is_cuda, **options
    )


def by_dimension(params: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Groups: matrices, kernels and embeddings decay; biases and gains do not, as in common recipes."""
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
