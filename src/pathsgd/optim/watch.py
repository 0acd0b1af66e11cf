"""Whether somebody else has written the weights, as far as that can be seen."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Stamp = tuple[int, int, tuple[float, ...]]
SAMPLED = 16


def stamps(tensors: Iterable[Tensor]) -> list[Stamp]:
    """What shows whether a tensor was written: where it lies, torch's count of writes to it, and, where
    looking is cheap, a few of its numbers, since writes through ``.data`` and numpy are not counted."""
    return [(t.data_ptr(), t._version, _sample(t)) for t in tensors]


def _sample(tensor: Tensor) -> tuple[float, ...]:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return ()
    flat = tensor.detach().view(-1)
    return tuple(flat[:: max(len(flat) // SAMPLED, 1)].tolist())


def blind() -> bool:
    """Whether this is being compiled, or captured in a CUDA graph: then no number can be looked at."""
    return torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
