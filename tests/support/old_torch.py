"""Marks of tests that need something newer than the oldest torch that is supported (`make oldest`)."""

from __future__ import annotations

import math

import pytest
import torch


def needs_torch(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    reason = f"torch {major}.{minor} or newer: {what}"
    return pytest.mark.skipif(torch.__version__ < (major, minor), reason=reason)


MOST_GRAPHS = 1 if torch.__version__ >= (2, 11) else math.inf
"""That a compiled step of PathSGD is made of: the older compilers cut it into several."""

needs_muon = needs_torch(2, 9, "torch.optim.Muon")
MUON = pytest.param("Muon", marks=needs_muon)
