"""One thread per worker, fixed seeds, and hypothesis without deadlines (the first export is slow)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
