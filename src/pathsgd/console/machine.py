"""The machine: its devices, how products are rounded there, and how it is shared out among runs."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from itertools import pairwise

import torch

from pathsgd._torch import allow_cudnn_tf32
from pathsgd.errors import PathError

SMALL = 1 << 20
"""Weights under which a network gains nothing from several threads."""
MOST_LANES = 4
EVEN_IF_ASKED = 16
"""Each takes two of the 32 streams that torch has."""
GPU_LANES = 3
"""One leaves it partly idle: on an H200 the paper's networks take 0.84 of the time so, two at a time 0.88."""


def device_of(name: str | None) -> torch.device:
    """The device of this name, or the best there is."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # whatever a backend that is not there raises
        raise PathError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def allow_tf32(allowed: bool) -> None:
    """In products and convolutions on GPUs, for the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    allow_cudnn_tf32(allowed)


def weights_of(features: int, hidden: tuple[int, ...], classes: int) -> int:
    widths = (features, *hidden, classes)
    return sum(math.prod(pair) for pair in pairwise(widths))


def check_memory(device: torch.device, weights: int) -> None:
    """Refuses networks that cannot fit: a CPU would take them and be killed on the way."""
    needed, there = _needed(weights), _memory(device)
    if needed > there:
        raise PathError(
            f"a network of {weights:.2g} weights needs {needed / 1e9:.0f} GB or more, and there are "
            f"{there / 1e9:.0f} GB: fewer --hidden units"
        )


def _needed(weights: int) -> int:
    """Bytes: in fp32, with gradients and one number of state."""
    return 12 * weights


def _memory(device: torch.device) -> float:
    """Bytes; infinite where it cannot be known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return math.inf


def share_out(
    device: torch.device, weights: int, lanes: int | None, methods: Sequence[str], alone: bool = False
) -> int:
    """Sets torch's threads for networks of so many weights; the number of runs at a time.

    On a GPU several share it, unless one should be alone or takes much of its memory. On a CPU small networks
    are run with one thread each, several at a time, and large ones with all threads, one at a time. The
    number of threads depends on nothing else: it may change the last bits of a sum.
    """
    if lanes is not None and not 1 <= lanes <= EVEN_IF_ASKED:
        raise PathError(f"Invalid number of lanes: {lanes} (1 to {EVEN_IF_ASKED})")
    if device.type == "cpu" and "muon" in methods:
        # On a CPU without bf16 torch gives up mkldnn for good at the first product Muon asks for, and rounds
        # otherwise from then on: let that happen before the first run, not in the middle of one.
        x = torch.ones(2, 2, dtype=torch.bfloat16)
        x @ x
    if device.type == "cuda":
        little = 10 * _needed(weights) < _memory(device)
        return lanes or (GPU_LANES if little and not alone else 1)
    if weights >= SMALL:
        return lanes or 1
    torch.set_num_threads(1)
    # Threads of Python change more often than every 5 ms: steps are shorter.
    sys.setswitchinterval(5e-4)
    return lanes or min(os.cpu_count() or 1, MOST_LANES)
