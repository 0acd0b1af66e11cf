"""Runs: what they record, how they end, and that an interruption changes no number."""

import dataclasses

import pytest

from study.methods import METHODS
from study.runs import RunFolder
from study.training import prepare_data
from support.short_runs import CPU, SMALL, Killed, train_small


@pytest.mark.parametrize(
    ("method", "dropout"), [*((method, 0.5) for method in METHODS), ("sgd", 0.0), ("path-sgd", 0.0)]
)
def test_an_interrupted_run_ends_with_the_same_bits(training_data, tmp_path, method, dropout):
    config = dataclasses.replace(SMALL, method=method, dropout=dropout, step_size=0.01)
    expected, _ = train_small(config, training_data, tmp_path / "whole")
    for epoch in (1, 2):
        with pytest.raises(Killed):
            train_small(config, training_data, tmp_path / "cut", kill_at=epoch)
        half = RunFolder(tmp_path / "cut", config).metrics
        half.write_bytes(half.read_bytes() + b'{"epoch": 9, "train_lo')  # as a kill in mid-write leaves it
    found, seen = train_small(config, training_data, tmp_path / "cut")
    assert seen[0]["epoch"] == 0
    assert len(seen) == 4
    assert found.lines == expected.lines
    whole, cut = (RunFolder(tmp_path / name, config).metrics.read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_other_norms_and_batches(digits, tmp_path):
    for changes in (
        {"p": 1.0, "hidden": (12, 12, 12), "step_size": 10.0},
        {"centre": False, "batch": 37},
    ):
        config = dataclasses.replace(SMALL, **changes)
        found, _ = train_small(config, prepare_data(digits, config, CPU), tmp_path)
        losses = found.curve("train_loss")
        assert found.status == "done"
        assert losses[-1] < losses[1], changes  # of the first epoch, with dropout as in the last


@pytest.mark.parametrize("method", ["sgd", "path-sgd", "adagrad", "path-momentum", "path-adam"])
def test_a_step_size_that_explodes_is_recorded_as_diverged(training_data, tmp_path, method):
    config = dataclasses.replace(SMALL, method=method, step_size=1e30)
    found, _ = train_small(config, training_data, tmp_path)
    assert found.status == "diverged"
    assert "not finite in epoch" in found.reason
    assert found.best == (1.0, 0) or found.best[0] > 0.1
    again, seen = train_small(config, training_data, tmp_path)
    assert again == found
    assert seen == []


def test_a_run_that_learns_nothing_is_stopped_after_its_grace(training_data, tmp_path):
    config = dataclasses.replace(SMALL, method="sgd", step_size=1e-9, grace=2)
    found, _ = train_small(config, training_data, tmp_path)
    assert (found.status, len(found.lines)) == ("stopped", 3)
    assert "where guessing has 90.0%" in found.reason
    assert (
        train_small(dataclasses.replace(config, step_size=0.1), training_data, tmp_path)[0].status == "done"
    )
