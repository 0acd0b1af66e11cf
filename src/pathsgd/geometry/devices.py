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


@functools.cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether Triton can multiply in the precision of fp32 there: on NVIDIA's GPUs since Ampere."""
    if device.type != "cuda" or torch.version.cuda is None or not has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Inside, this is the current GPU, as Triton and CUDA graphs want it; for a CPU nothing changes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
