"""Devices: by their name, and how they round products."""

from __future__ import annotations

import torch

from pathsgd._torch import allow_cudnn_tf32
from pathsgd.errors import PathError


def find_device(name: str | None) -> torch.device:
    """The device of this name; without a name a GPU if there is one.

    Raises:
        PathError: There is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # whatever a backend that is not there raises
        raise PathError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def device_name(device: torch.device) -> str:
    """The model of a GPU, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def allow_tf32(allowed: bool) -> None:
    """In products and convolutions on GPUs, for the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    allow_cudnn_tf32(allowed)
