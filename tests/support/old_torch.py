"""Marks of tests that need something newer than the oldest torch that is supported (`make oldest`)."""

from __future__ import annotations

import pytest
import torch


def needs_torch(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    reason = f"torch {major}.{minor} or newer: {what}"
    return pytest.mark.skipif(torch.__version__ < (major, minor), reason=reason)


needs_muon = needs_torch(2, 9, "torch.optim.Muon")
MUON = pytest.param("Muon", marks=needs_muon)
