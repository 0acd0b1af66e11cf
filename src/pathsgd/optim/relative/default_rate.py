"""The rate of an optimizer that was given neither a rate nor a schedule.

A relative step has the same length whatever the gradient's, so at a constant rate weights end up moving
around where they are going, as far away as the step is long. A schedule takes care of that. Without one the
rate falls with the number of steps, which need not be known before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

STEPS = 10
"""After so many, the rate begins to fall."""

Groups = Sequence[dict[str, Any]]


class DefaultRate:
    """Lowers the rates of these groups as ``1 / sqrt(1 + steps / STEPS)``, until something else sets one or a
    scheduler takes over."""

    def __init__(self, groups: Groups) -> None:
        self.first: list[float] = [group["lr"] for group in groups]
        self.steps = 0
        self.is_ours = True
        self._counts = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it would be compiled again for every rate
    def before_step(self, groups: Groups) -> None:
        """Looks whether the rates are still as they were left."""
        rates = [group["lr"] for group in groups]
        # A step at rate 0 changes nothing: torch's checkpoints take one to make the state.
        self._counts = any(isinstance(rate, torch.Tensor) or rate != 0 for rate in rates)
        if self._counts:
            self.is_ours &= rates == self._find(len(groups)) and not _has_scheduler(groups)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_step(self, groups: Groups) -> None:
        if self.is_ours and self._counts:
            self.steps += 1
            for group, rate in zip(groups, self._find(len(groups)), strict=True):
                group["lr"] = rate

    def resume(self, groups: Groups) -> None:
        """The rates were loaded: how many steps had been taken shows in them."""
        rate = groups[0]["lr"]
        self.is_ours = isinstance(rate, float) and 0 < rate <= self.first[0] and not _has_scheduler(groups)
        if self.is_ours:
            self.steps = round(STEPS * ((self.first[0] / rate) ** 2 - 1))

    def _find(self, count: int) -> list[float]:
        first = self.first + self.first[:1] * (count - len(self.first))  # groups that were added
        return [rate / math.sqrt(1 + self.steps / STEPS) for rate in first]


def _has_scheduler(groups: Groups) -> bool:
    return any("initial_lr" in group for group in groups)  # which they write
