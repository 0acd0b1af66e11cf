"""Digits, loaded once, and a made-up study, drawn once."""

from __future__ import annotations

import pytest

from pathsgd.paper.data.load import load
from pathsgd.paper.figures import draw_all
from pathsgd.paper.training.training_data import prepare_data
from support.brief_timing import _brief_timing  # noqa: F401
from support.fake_study import NAUGHTY, fake_study
from support.short_runs import CPU, SMALL


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture(scope="module")
def training_data(digits):
    return prepare_data(digits, SMALL, CPU)


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
