"""CIFAR-10 in fewer bytes: 20000 images to train on, 5000 and 10000 of the other training images held out, in
four files of 9 and 17 MB.

Green, red - green and blue - green, each as the second difference over rows and columns, all modulo 256;
the same pixel of all images stands together, and deflate codes it with Huffman's code alone.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Part = Literal["train", "valid", "test"]
FILES = {
    "train-1": "data_batch_1.bin", "train-2": "data_batch_2.bin", "valid": "data_batch_5.bin",
    "test": "data_batch_4.bin",
}  # fmt: skip
"""What each packed file has of which published one; of the third only the first VALID images."""
VALID = 5000
BYTES = 3073  # a label and three planes of 32 x 32


def pack_folder(source: Path, target: Path) -> list[Path]:
    """Packs ``source/cifar-10-batches-bin`` (or ``source``) into ``target``; returns the files."""
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for part in FILES:
        path = target / f"cifar10-{part}.z"
        path.write_bytes(encode(*_read_part(source, part)))
        written.append(path)
    return written


def read_cifar(folder: Path) -> dict[Part, tuple[Tensor, Tensor]]:
    """Images (n, 3, 32, 32) in bytes and labels by part; packed or as published."""
    if (folder / "cifar10-train-1.z").exists():
        read = {part: decode((folder / f"cifar10-{part}.z").read_bytes()) for part in FILES}
    else:
        read = {part: _read_part(folder, part) for part in FILES}
    (x1, y1), (x2, y2) = read["train-1"], read["train-2"]
    return {"train": (torch.cat([x1, x2]), torch.cat([y1, y2])), "valid": read["valid"], "test": read["test"]}


def _read_part(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    x, y = _read_bin(folder, FILES[part])
    return (x[:VALID], y[:VALID]) if part == "valid" else (x, y)


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
