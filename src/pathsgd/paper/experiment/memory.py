"""The bytes of a tensor, for checksums."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from torch import Tensor

PIECE = 1 << 24


def bytes_of(tensor: Tensor) -> Iterator[bytes]:
    """Read from memory: numpy need not be there, and a storage would go through Python byte by byte."""
    whole = tensor.contiguous()
    size, start = whole.numel() * whole.element_size(), whole.data_ptr()
    for k in range(0, size, PIECE):
        yield ctypes.string_at(start + k, min(PIECE, size - k))
