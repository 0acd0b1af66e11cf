"""How a machine is shared out: threads of one run, and runs at a time."""

from __future__ import annotations

import math
import os
import sys
from itertools import pairwise

import torch

from pathsgd.errors import PathError

SMALL = 1 << 20
"""Weights under which a network gains nothing from several threads."""
MOST_LANES = 4


def device_of(name: str | None) -> torch.device:
    """The device of this name, or the best there is."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PathError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def weights_of(features: int, hidden: tuple[int, ...], classes: int) -> int:
    widths = (features, *hidden, classes)
    return sum(math.prod(pair) for pair in pairwise(widths))


def share_out(device: torch.device, weights: int, lanes: int | None) -> int:
    """Sets torch's threads for networks of so many weights; the number of runs at a time.

    On a CPU small networks are run with one thread each, several at a time, and large ones with all threads,
    one at a time. The number of threads depends on nothing else: it may change the last bits of a sum.
    """
    if lanes is not None and lanes < 1:
        raise PathError(f"Invalid number of lanes: {lanes}")
    if device.type == "cuda" or weights >= SMALL:
        return lanes or 1
    torch.set_num_threads(1)
    # Threads of Python change more often than every 5 ms: steps are shorter.
    sys.setswitchinterval(5e-4)
    return lanes or min(os.cpu_count() or 1, MOST_LANES)
