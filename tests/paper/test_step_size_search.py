"""Which step size wins, and which stopped runs are resumed."""

from __future__ import annotations

import dataclasses

from pathsgd.paper.records.run_folder import RunRecord
from pathsgd.paper.step_size_search import choose_winner, find_resumable
from support.short_runs import SMALL


def recorded(step_size, status="done", errors=(0.5, 0.2, 0.3)):
    config = dataclasses.replace(SMALL, step_size=step_size, validation=10)
    lines = [{"epoch": k, "validation_error": e} for k, e in enumerate((0.9, *errors))]
    return RunRecord(config, status, lines)


def test_the_winner_has_the_lowest_error_and_of_equals_the_fewest_epochs():
    slow, fast = recorded(1.0, errors=(0.5, 0.4, 0.2)), recorded(0.1, errors=(0.5, 0.2, 0.3))
    lucky = recorded(0.5, "diverged", errors=(0.5, 0.01, None))
    assert choose_winner([slow, fast, lucky]) is fast
    assert choose_winner([fast, slow]) is fast
    assert choose_winner([lucky]) is None
    equal = recorded(0.3, errors=(0.5, 0.2, 0.3))
    assert choose_winner([fast, equal]) is choose_winner([equal, fast]) is equal


def test_stopped_runs_are_carried_on_only_if_nothing_learned():
    stopped, learned = recorded(1e-9, "stopped", (0.9,)), recorded(0.1)
    hopeless, diverged = recorded(1e-3, errors=(0.9, 0.88, 0.85)), recorded(1.0, "diverged", (None,))
    assert find_resumable([stopped, learned], classes=10) == []
    assert find_resumable([stopped, hopeless], classes=10) == [stopped]
    assert find_resumable([stopped, recorded(1e-3, errors=(0.7, 0.6, 0.5))], classes=10) == [stopped]
    assert find_resumable([stopped, diverged], classes=10) == [stopped]
