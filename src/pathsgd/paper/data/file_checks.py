"""What every reader checks: that a file can be read, is no larger than it may be, and has sound labels."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from pathsgd import PathError

MOST_EXAMPLES = 1_000_000
"""In one file. More than any data set read here, and few enough to keep in memory."""

CHUNK = 1 << 20
RENEW = "delete it to have it downloaded again, or put the original there"


def one_line(error: BaseException) -> str:
    """What went wrong, without the file name that an OSError repeats."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what goes wrong while a file is read or decompressed into one line about that file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise PathError(f"{path} cannot be read to its end ({one_line(error)}): {RENEW}") from error


def read_at_most(stream: BinaryIO, count: int) -> bytearray:
    """Up to ``count`` bytes. Memory grows with what is there, not with what a header claims."""
    found = bytearray()
    while len(found) < count and (chunk := stream.read(min(CHUNK, count - len(found)))):
        found += chunk
    return found


def check_labels(labels: Tensor, classes: int, path: Path, *, first: int = 0) -> None:
    lowest, largest = int(labels.min()), int(labels.max())
    if lowest < first or largest >= first + classes:
        raise PathError(
            f"{path} has labels from {lowest} to {largest}, expected {first} to {first + classes - 1}: "
            f"{RENEW}"
        )
