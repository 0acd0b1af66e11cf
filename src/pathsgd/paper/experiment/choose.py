"""Which step size wins: the lowest validation error, and of equals the one that reaches it in fewer epochs.

Only runs that went to their end can win. One that diverged is recorded and loses. One that was stopped
because it had learned nothing in its grace loses to a run that is clearly ahead; if none is, the stopped ones
are carried on before a winner is named.
"""

from __future__ import annotations

from collections.abc import Sequence

from pathsgd.paper.experiment.record import Recorded

CLEAR = 0.5
"""Of the error of guessing: below it a winner is so far ahead that what had learned nothing stays stopped."""


def winner(runs: Sequence[Recorded]) -> Recorded | None:
    """The best of the runs that ended well; None if there is none."""
    done = [run for run in runs if run.status == "done"]
    # Of equals in both the larger step: the result must not depend on the order of the list.
    return min(done, key=lambda run: (*run.best, -run.run.step_size), default=None)


def to_carry_on(runs: Sequence[Recorded], classes: int) -> list[Recorded]:
    """Runs that were stopped though the best of the others is not clearly ahead."""
    best = winner(runs)
    if best is not None and best.best[0] < CLEAR * (1 - 1 / classes):
        return []
    return [run for run in runs if run.status == "stopped"]
