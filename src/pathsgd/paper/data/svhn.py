"""SVHN's cropped digits: MATLAB 5 files with X (32, 32, 3, n) and y (n, 1), where 10 stands for digit 0."""

from __future__ import annotations

import re
import struct
import warnings
import zlib
from pathlib import Path
from typing import BinaryIO

import torch

from pathsgd import PathError
from pathsgd.console.optional_imports import import_optional
from pathsgd.paper.data.dataset import Split
from pathsgd.paper.data.file_checks import CHUNK, RENEW, check_labels, one_line, reading

COMPRESSED = 15
HEADER = 128
INFLATED = 2 << 30
"""Bytes a file may inflate to; the largest file of SVHN, the extra digits, needs 1.6e9."""


def read_svhn(path: Path) -> Split:
    matlab = import_optional("scipy.io", f"reading {path.name}")
    with reading(path), path.open("rb") as stream:
        _check_inflated(stream, path)
        stream.seek(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # scipy warns of an array it cannot read and gives a string
                found = matlab.loadmat(stream, appendmat=False, variable_names=["X", "y"])
        except Exception as error:  # whatever a broken file makes the parser raise
            raise _broken(path, error) from error
    shapes = {name: getattr(found.get(name), "shape", ()) for name in ("X", "y")}
    kinds = {name: str(getattr(found.get(name), "dtype", "missing")) for name in ("X", "y")}
    count = shapes["X"][-1] if shapes["X"] else 0
    numeric = re.fullmatch(r"u?int\d+|float\d+", kinds["y"])
    if (
        not count
        or shapes != {"X": (32, 32, 3, count), "y": (count, 1)}
        or kinds["X"] != "uint8"
        or not numeric
    ):
        raise PathError(
            f"{path} has X {shapes['X']} of {kinds['X']} and y {shapes['y']} of {kinds['y']}, expected "
            f"(32, 32, 3, n) of uint8 and (n, 1) numbers: {RENEW}"
        )
    y = torch.tensor(found["y"].reshape(-1).tolist(), dtype=torch.float64)
    if not bool((y == y.round()).all()):
        raise PathError(f"{path} has labels that are not whole numbers: {RENEW}")
    check_labels(y, 10, path, first=1)
    x = torch.from_numpy(found["X"]).permute(3, 2, 0, 1).reshape(count, -1)
    return x.contiguous(), y.long() % 10


def _broken(path: Path, error: Exception) -> PathError:
    return PathError(f"{path} is no sound MATLAB 5 file ({one_line(error)}): {RENEW}")


def _check_inflated(stream: BinaryIO, path: Path) -> None:
    """Walks over the file's elements and inflates them into nothing.

    scipy allocates what an element claims; a few megabytes can claim, and inflate to, a whole memory.
    """
    order = {b"IM": "<", b"MI": ">"}.get(stream.read(HEADER)[HEADER - 2 :])
    if order is None:
        raise _broken(path, ValueError("no such header"))
    left = INFLATED
    end = stream.seek(0, 2)
    place = HEADER
    while place < end:
        stream.seek(place)
        tag = stream.read(8)
        kind, size = struct.unpack(f"{order}II", tag) if len(tag) == 8 else (0, 0)
        place += 8 + size
        if len(tag) < 8 or place > end:
            raise _broken(path, ValueError(f"it ends at byte {end}, within an element"))
        if kind == COMPRESSED:
            left -= _inflated(stream, size, left)
            if left < 0:
                raise PathError(f"{path} inflates to more than {INFLATED} bytes: {RENEW}")


def _inflated(stream: BinaryIO, size: int, most: int) -> int:
    """The bytes that the next ``size`` bytes inflate to, counted until they are more than ``most``."""
    inflate = zlib.decompressobj()
    count = 0
    while size > 0 and count <= most:
        chunk = stream.read(min(CHUNK, size))
        size -= len(chunk)
        while chunk and count <= most:
            count += len(inflate.decompress(chunk, CHUNK))
            chunk = inflate.unconsumed_tail
    return count
