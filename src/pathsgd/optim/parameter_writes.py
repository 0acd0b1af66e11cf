"""Who writes the parameters."""

from __future__ import annotations

from collections.abc import Sequence

from pathsgd._torch import Version

USUAL = 16
"""Steps in a row before which something else has to write to be expected to go on."""


class ParameterWrites:
    """Whether the parameters are as the last step left them. Whatever else writes them may move them by any
    amount, and out of the range of plain floats."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is known of them any more."""
        self._left: list[Version] | None = None
        self._by_others = 0
        """Steps in a row before which something else, as a second optimizer, had written them."""

    def after_step(self, before: Sequence[Version] | None, now: Sequence[Version]) -> None:
        """A step has written parameters of these versions, if they are known."""
        if self._left is not None and before is not None:
            self._by_others = 0 if self._left == before else self._by_others + 1
        self._left = list(now)

    def are_of_step(self, now: Sequence[Version]) -> bool:
        """Whether the last step has written them last."""
        return self._left == now

    def are_unusual(self, now: Sequence[Version]) -> bool:
        """Whether something else may have written them which does not always do so."""
        return self._by_others < USUAL and not self.are_of_step(now)
