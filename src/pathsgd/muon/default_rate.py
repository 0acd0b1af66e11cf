"""The rate of an optimizer that was given neither a rate nor a schedule.

A relative step has the same length whatever the gradient's, so at a constant rate weights end up moving
around where they are going, as far away as the step is long. A schedule takes care of that. Without one the
rate falls with the number of steps, which need not be known before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from pathsgd._torch import is_capturing, keep_uncompiled
from pathsgd.training.lazy_graph import find_depth_of_caller

KEY = "steps_without_schedule"
"""In the groups, so that it is saved with them."""
HOLD = 30
"""Steps at the full rate: short runs need it."""
SCALE = 5
"""Steps after that in which the square of the rate is halved."""

Groups = Sequence[dict[str, Any]]


class DefaultRate:
    """Lowers the rates of these groups as the square root of the number of steps, until something else sets
    one or a scheduler takes over."""

    def __init__(self, groups: Groups) -> None:
        self.first: list[float] = [group["lr"] for group in groups]
        self.is_ours = True
        self._counts = False
        for group in groups:
            group[KEY] = 0

    @keep_uncompiled  # it would be compiled again for every rate
    def before_step(self, groups: Groups) -> None:
        """Looks whether the rates are still as they were left."""
        rates = [group["lr"] for group in groups]
        if any(isinstance(rate, torch.Tensor) for rate in rates):  # to compare it would wait for the GPU
            self.is_ours = False
        if not self.is_ours:
            return
        # A step at rate 0 changes nothing: torch's checkpoints take one to make the state.
        self._counts = any(rate != 0 for rate in rates)
        if self._counts:
            self.is_ours = rates == self._find(groups) and not _has_scheduler(groups)
        if self.is_ours and is_capturing():
            warnings.warn(
                "a step at the default rate is captured in a CUDA graph, whose replays do not lower it: "
                "set group['lr'] to a tensor on the GPU, and lower that",
                stacklevel=find_depth_of_caller(),
            )

    @keep_uncompiled
    def after_step(self, groups: Groups) -> None:
        if self.is_ours and self._counts:
            for group in groups:
                group[KEY] = group.get(KEY, 0) + 1
            for group, rate in zip(groups, self._find(groups), strict=True):
                group["lr"] = rate

    def resume(self, groups: Groups) -> None:
        """The groups were loaded."""
        self.is_ours = not _has_scheduler(groups)

    def _find(self, groups: Groups) -> list[float]:
        first = self.first + self.first[:1] * (len(groups) - len(self.first))  # groups that were added
        falling = [max(0, group.get(KEY, 0) - HOLD) for group in groups]
        return [rate / math.sqrt(1 + steps / SCALE) for rate, steps in zip(first, falling, strict=True)]


def _has_scheduler(groups: Groups) -> bool:
    return any("initial_lr" in group for group in groups)  # which they write
