"""Launching on the GPU where the tensors are: Triton and CUDA graphs take the current one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Inside, this is the current GPU; for a CPU nothing changes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
