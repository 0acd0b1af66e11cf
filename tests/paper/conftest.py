"""Digits, loaded once."""

from __future__ import annotations

import pytest

from pathsgd.paper.data.load import load
from pathsgd.paper.training.training_data import prepare_data
from support.short_runs import CPU, SMALL


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture(scope="module")
def training_data(digits):
    return prepare_data(digits, SMALL, CPU)
