"""Digits, loaded once, a made-up study, drawn once, and steps timed briefly."""

import pytest

from study import training
from study.figures import draw_all
from study.sources import load
from study.training import prepare_data
from support.fake_study import NAUGHTY, fake_study
from support.short_runs import CPU, SMALL


@pytest.fixture(scope="session", autouse=True)
def _brief_timing():
    """A study times steps for seconds at its end, and most tests are about something else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "SECONDS", 0.01)
        yield


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture(scope="module")
def training_data(digits):
    return prepare_data(digits, SMALL, CPU)


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes longer than training a small study: for tests that are about something else."""
    monkeypatch.setattr("study.api.draw_all", lambda results, folder: [])


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """Two data sets, one with a name to beware of; a run that diverged, a cell without a step size."""
    out = tmp_path_factory.mktemp("study")
    results = fake_study(
        out, datasets=("mnist", NAUGHTY), dropouts=(0.0, 0.5), repeats=2,
        diverged={("sgd", "unbalanced", 1): 4, ("adagrad", "balanced", 0): 1},
        unchosen=[("adagrad", "unbalanced")],
    )  # fmt: skip
    return results, draw_all(results, out / "figures")
