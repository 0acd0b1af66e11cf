"""The idx files of MNIST: big-endian magic number and sizes, then bytes; gzipped or not.

0000 0803, n, 28, 28, then n x 28 x 28 pixels        0000 0801, n, then n labels
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from pathsgd import PathError
from pathsgd.paper.data.dataset import Split
from pathsgd.paper.data.file_checks import MOST_EXAMPLES, RENEW, check_labels, read_at_most, reading

GZIP = b"\x1f\x8b"


def read_mnist(images: Path, labels: Path) -> Split:
    x = read_idx(images, (28, 28))
    y = read_idx(labels, ()).long()
    if len(x) != len(y):
        raise PathError(
            f"{images} has {len(x)} images and {labels.name} {len(y)} labels, expected as many: put the two "
            "files of one data set there"
        )
    check_labels(y, 10, labels)
    return x.flatten(1), y


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """The uint8 tensor (n, *shape) of an idx file of bytes."""
    with reading(path), path.open("rb") as raw:
        if raw.peek(2)[:2] == GZIP:
            with gzip.open(raw) as stream:
                return _read(cast(BinaryIO, stream), path, shape)
        return _read(raw, path, shape)


def _read(stream: BinaryIO, path: Path, shape: tuple[int, ...]) -> Tensor:
    axes = 1 + len(shape)
    head = read_at_most(stream, 4 + 4 * axes)
    if len(head) < 4 + 4 * axes:
        raise PathError(f"{path} ends within its header, after {len(head)} of {4 + 4 * axes} bytes: {RENEW}")
    magic, count, *found = struct.unpack(f">{1 + axes}I", head)
    if magic != 0x0800 + axes:
        raise PathError(f"{path} starts with {magic:#010x}, expected {0x0800 + axes:#010x} (idx): {RENEW}")
    if tuple(found) != shape:
        wrong, right = ("x".join(map(str, sizes)) for sizes in (found, shape))
        raise PathError(f"{path} holds images of {wrong} pixels, expected {right}: {RENEW}")
    if not 0 < count <= MOST_EXAMPLES:
        raise PathError(
            f"{path} claims to hold {count} examples, expected 1 to {MOST_EXAMPLES} (MNIST has 60000): "
            f"{RENEW}"
        )
    size = count * math.prod(shape)
    body = read_at_most(stream, size + 1)  # one more, so that a longer file is seen without reading it
    if len(body) != size:
        amount = f"only {len(body)}" if len(body) < size else "more"
        raise PathError(f"{path} promises {count} examples of {size} bytes and holds {amount}: {RENEW}")
    return torch.frombuffer(body, dtype=torch.uint8).view(count, *shape)
