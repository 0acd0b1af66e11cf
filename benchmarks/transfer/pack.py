"""CIFAR-10 in fewer bytes: 20000 training and 10000 test images in three files of 17 MB.

Green, red - green and blue - green, each as the second difference over rows and columns, all modulo 256;
the same pixel of all images stands together, and deflate codes it with Huffman's code alone.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

PARTS = ("train-1", "train-2", "test")
SOURCES = ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin")
BYTES = 3073  # a label and three planes of 32 x 32


def pack_folder(source: Path, target: Path) -> list[Path]:
    """Packs ``source/cifar-10-batches-bin`` (or ``source``) into ``target``; returns the files."""
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for part, name in zip(PARTS, SOURCES, strict=True):
        path = target / f"cifar10-{part}.z"
        path.write_bytes(encode(*_read_bin(source, name)))
        written.append(path)
    return written


def read_cifar(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 3, 32, 32) in bytes and labels, for training and for validation; packed or as published."""
    if (folder / f"cifar10-{PARTS[0]}.z").exists():
        parts = [decode((folder / f"cifar10-{part}.z").read_bytes()) for part in PARTS]
    else:
        parts = [_read_bin(folder, name) for name in SOURCES]
    (x1, y1), (x2, y2), (x_valid, y_valid) = parts
    return torch.cat([x1, x2]), torch.cat([y1, y2]), x_valid, y_valid


def _read_bin(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    inner = folder / "cifar-10-batches-bin"
    raw = ((inner if inner.is_dir() else folder) / name).read_bytes()
    rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, BYTES)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].clone()


def encode(x: Tensor, y: Tensor) -> bytes:
    """Bytes of images and labels."""
    red, green, blue = x.unbind(1)
    planes = torch.stack([green, red - green, blue - green])
    for axis in (2, 3):
        before = torch.zeros_like(planes.narrow(axis, 0, 1))
        planes = torch.diff(planes, dim=axis, prepend=before)
    pixels = planes.permute(0, 2, 3, 1).contiguous()
    deflate = zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)
    return deflate.compress(y.numpy().tobytes() + pixels.numpy().tobytes()) + deflate.flush()


def decode(data: bytes) -> tuple[Tensor, Tensor]:
    """Images and labels of bytes."""
    raw = torch.frombuffer(bytearray(zlib.decompress(data)), dtype=torch.uint8)
    count = len(raw) // BYTES
    planes = raw[count:].view(3, 32, 32, count).permute(0, 3, 1, 2)
    for axis in (2, 3):
        planes = planes.cumsum(axis, dtype=torch.uint8)
    green, red, blue = planes
    return torch.stack([red + green, green, blue + green], 1), raw[:count].clone()
