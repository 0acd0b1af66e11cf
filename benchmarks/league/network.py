"""What an entry of the league is: a network, its task and how long it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Network:
    """A network with what it is trained on.

    Attributes:
        label: its name in tables.
        build: makes it on the CPU, with torch's global random numbers.
        task: a name of ``tasks.TASKS``.
        cost: seconds of a run with AdamW on a GPU, roughly: the longest jobs are begun first.
        schedule: 5% of warm-up and a cosine to zero, or nothing: what a user forgets.
        captured: whether a step can be captured in a CUDA graph.
    """

    label: str
    build: Callable[[], nn.Module]
    task: str
    cost: float
    schedule: str = "cosine"
    captured: bool = True
