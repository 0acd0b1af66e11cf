"""Whether somebody else has written the weights, as far as that can be seen."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Stamp = tuple[int, int, tuple[int, ...]]
SAMPLED = 16


def stamps(tensors: Iterable[Tensor]) -> list[Stamp]:
    """What shows whether a tensor was written: where it lies, torch's count of writes to it, and, where
    looking is cheap, a few of its numbers, since writes through ``.data`` and numpy are not counted."""
    return [(t.data_ptr(), t._version, _sample(t)) for t in tensors]


def _sample(tensor: Tensor) -> tuple[int, ...]:
    """The bits of a few numbers, read from memory: torch would take a microsecond for each."""
    count = tensor.numel()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not count:
        return ()
    size, start = tensor.element_size(), tensor.data_ptr()
    every = max(count // SAMPLED, 1) * size
    read = _BITS.get(size, ctypes.c_uint8).from_address
    return tuple([read(address).value for address in range(start, start + count * size, every)])


_BITS: dict[int, Any] = {2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


def blind() -> bool:
    """Whether this is being compiled, or captured in a CUDA graph: then no number can be looked at."""
    return torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
