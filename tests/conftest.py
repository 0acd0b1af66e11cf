"""One thread per worker, fixed seeds, and hypothesis without deadlines (the first export is slow).

Without a GPU the Triton kernels are run by Triton's interpreter, which must be said before it is imported.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        from support.interpreted_triton import replace_once_per_launch

        replace_once_per_launch()

settings.register_profile("default", deadline=None, derandomize=True, max_examples=15)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
