"""The binary versions of CIFAR: records of a label and 3072 pixels, the red, green and blue planes in turn.

CIFAR-100 has two labels, the superclass before the class. The Python versions of these sets are pickles,
which run code when they are read; they are not read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pathsgd import PathError
from pathsgd.paper.data.dataset import Split
from pathsgd.paper.data.file_checks import MOST_EXAMPLES, RENEW, check_labels, read_at_most, reading

PIXELS = 3 * 32 * 32


def read_cifar(paths: Sequence[Path], labels: Sequence[int]) -> Split:
    """All records of these files. ``labels`` has the classes of each label byte; the last one is kept."""
    splits = [_read_file(path, labels) for path in paths]
    return torch.cat([x for x, _ in splits]), torch.cat([y for _, y in splits])


def _read_file(path: Path, labels: Sequence[int]) -> Split:
    record = len(labels) + PIXELS
    with reading(path), path.open("rb") as stream:
        body = read_at_most(stream, MOST_EXAMPLES * record + 1)
    if not body or len(body) % record or len(body) > MOST_EXAMPLES * record:
        raise PathError(
            f"{path} has {len(body)} bytes, expected 1 to {MOST_EXAMPLES} records of {record} bytes "
            f"({len(body) % record} are left over): {RENEW}"
        )
    records = torch.frombuffer(body, dtype=torch.uint8).view(-1, record)
    for place, classes in enumerate(labels):  # superclasses too: they tell a shifted file from a sound one
        check_labels(records[:, place], classes, path)
    return records[:, len(labels) :].contiguous(), records[:, len(labels) - 1].long()
