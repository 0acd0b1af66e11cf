"""Which step size wins, and which stopped runs are trained to the end."""

import dataclasses
from types import SimpleNamespace

import pytest

from study.api import choose_winner, find_stopped_too_early, search_step_sizes
from study.config import Study
from study.files import from_json, read_json
from study.run_queue import Progress
from study.runs import Choice, DataInfo, RunRecord
from study.tables import tabulate_choices
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


def test_stopped_runs_are_resumed_unless_one_is_clearly_ahead():
    stopped, learned = recorded(1e-9, "stopped", (0.9,)), recorded(0.1)
    hopeless, diverged = recorded(1e-3, errors=(0.9, 0.88, 0.85)), recorded(1.0, "diverged", (None,))
    assert find_stopped_too_early([stopped, learned], classes=10) == []
    assert find_stopped_too_early([stopped, hopeless], classes=10) == [stopped]
    assert find_stopped_too_early([stopped, recorded(1e-3, errors=(0.8, 0.75, 0.73))], classes=10) == [
        stopped
    ]
    assert find_stopped_too_early([stopped, recorded(1e-3, errors=(0.8, 0.75, 0.71))], classes=10) == []
    assert find_stopped_too_early([stopped, diverged], classes=10) == [stopped]


@pytest.mark.parametrize(
    ("step_sizes", "best", "beyond"),
    [((1.0, 0.1, 0.01), 1.0, 10.0), ((0.01, 1.0, 0.1), 0.1, None), ((1.0, 0.1), 1.0, None)],
)
def test_beyond_the_largest_one_more_is_shown_and_not_used(tmp_path, step_sizes, best, beyond):
    study = Study(methods=("sgd",), inits=("balanced",), dropouts=(0.0,), step_sizes=step_sizes)
    trained = []

    def train_all(title, runs):
        trained.extend(run.step_size for run in runs)
        errors = {best: 0.2, beyond: 0.1}  # the one beyond would win
        return {run: recorded(run.step_size, errors=[errors.get(run.step_size, 0.3)]) for run in runs}

    queue = SimpleNamespace(out=tmp_path, train_all=train_all, progress=Progress())
    infos = {"digits": DataInfo("x", (64,), 10, 1442, 355)}
    (choice,) = search_step_sizes(study, infos, queue)
    assert trained == [*step_sizes, *([beyond] if beyond else [])]
    assert choice.step_size == best
    assert from_json(Choice, read_json(tmp_path / "choices.json")[0], "") == choice
    table = str(tabulate_choices([choice]))
    assert ("(10.00%)" in table, "the largest won" in table) == (bool(beyond), bool(beyond))
    assert ("the largest tried; 10: 10.00%" in str(choice)) is bool(beyond)
