"""How many runs are trained at a time, with how many threads, and whether their network fits into memory."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence

import torch

from pathsgd import PathError

SMALL = 1 << 20
"""Weights below which a network is trained no faster by several threads."""
MAX_CPU_LANES = 4
MAX_LANES = 16
"""Each takes two of the 32 streams that torch has."""
GPU_LANES = 3
"""One leaves it partly idle: on an H200 the paper's networks take 0.84 of the time so, two at a time 0.88."""


def check_memory(device: torch.device, weights: int) -> None:
    """Refuses networks that cannot fit: a CPU would start on them, and the process be killed on the way."""
    needed, available = _needed_bytes(weights), _memory_bytes(device)
    if needed > available:
        raise PathError(
            f"a network of {weights:.2g} weights needs {needed / 1e9:.0f} GB or more, and there are "
            f"{available / 1e9:.0f} GB: fewer --hidden units"
        )


def choose_lanes(
    device: torch.device, weights: int, lanes: int | None, methods: Sequence[str], alone: bool = False
) -> int:
    """Sets torch's threads for networks of this many weights; returns the number of runs at a time.

    On a GPU several share it, unless one should be alone or takes much of its memory. On a CPU small networks
    are run with one thread each, several at a time, and large ones with all threads, one at a time. The
    number of threads depends on nothing else: it may change the last bits of a sum.
    """
    if lanes is not None and not 1 <= lanes <= MAX_LANES:
        raise PathError(f"Invalid number of lanes: {lanes} (1 to {MAX_LANES})")
    if device.type == "cpu" and "muon" in methods:
        # On a CPU without bf16 torch gives up mkldnn for good at Muon's first product, and rounds otherwise
        # from then on: this makes it happen before the first run, not in the middle of one.
        x = torch.ones(2, 2, dtype=torch.bfloat16)
        x @ x
    if device.type == "cuda":
        little = 10 * _needed_bytes(weights) < _memory_bytes(device)
        return lanes or (GPU_LANES if little and not alone else 1)
    if weights >= SMALL:
        return lanes or 1
    torch.set_num_threads(1)
    sys.setswitchinterval(5e-4)  # a step is shorter than the 5 ms that Python takes otherwise
    return lanes or min(os.cpu_count() or 1, MAX_CPU_LANES)


def _needed_bytes(weights: int) -> int:
    """In fp32, with gradients and one number of state."""
    return 12 * weights


def _memory_bytes(device: torch.device) -> float:
    """Infinite where it cannot be known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return math.inf
