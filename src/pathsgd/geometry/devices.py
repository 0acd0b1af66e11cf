"""Launching kernels on a GPU."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch


@functools.cache
def has_triton() -> bool:
    """Builds of torch for GPUs bring it along, but on Windows."""
    return importlib.util.find_spec("triton") is not None


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Inside, this is the current GPU, as Triton and CUDA graphs want it; for a CPU nothing changes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
