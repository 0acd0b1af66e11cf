"""Checksums of tensors."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
from torch import Tensor

from pathsgd.paper.data.dataset import Dataset

CHUNK = 1 << 24


def checksum_dataset(data: Dataset) -> str:
    """Of all its numbers."""
    digest = hashlib.sha256(repr((data.shape, data.classes)).encode())
    for tensor in (data.train_x, data.train_y, data.test_x, data.test_y):
        _add_bytes(digest, tensor)
    return digest.hexdigest()[:16]


def checksum_state(head: bytes, state: Any) -> str:
    """Of some bytes and every bit of a state dict."""
    digest = hashlib.sha256(head)
    _add(digest, state)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        _add_bytes(digest, value.detach().cpu())
    elif isinstance(value, dict):
        for key, one in value.items():
            digest.update(repr(key).encode())
            _add(digest, one)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}".encode())
        for one in value:
            _add(digest, one)
    else:
        digest.update(repr(value).encode())


def _add_bytes(digest: Any, tensor: Tensor) -> None:
    # From memory: numpy may be missing, and a storage goes through Python byte by byte.
    whole = tensor.contiguous()
    size, start = whole.numel() * whole.element_size(), whole.data_ptr()
    for k in range(0, size, CHUNK):
        digest.update(ctypes.string_at(start + k, min(CHUNK, size - k)))
