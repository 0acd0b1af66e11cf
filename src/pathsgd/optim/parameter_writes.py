"""Who writes the parameters."""

from __future__ import annotations

from collections.abc import Sequence

from pathsgd._torch import Version


class ParameterWrites:
    """Whether the parameters are as the last step left them. Whatever else writes them may move them by any
    amount, and out of the range of plain floats."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is known of them any more."""
        self._left: list[Version] | None = None
        self._others_write = False

    def after_step(self, before: Sequence[Version] | None, now: Sequence[Version]) -> None:
        """A step has written parameters of these versions, if they are known. If something else had written
        them before it, as a second optimizer does, it will before the next."""
        if self._left is not None and before is not None:
            self._others_write = self._left != before
        self._left = list(now)

    def are_of_step(self, now: Sequence[Version]) -> bool:
        """Whether the last step has written them last."""
        return self._left == now

    def are_unusual(self, now: Sequence[Version]) -> bool:
        """Whether something else may have written them which does not always do so."""
        return not self._others_write and not self.are_of_step(now)
