"""The maps between w and z, where gamma is zero and where it is not a number."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat
from pathsgd.geometry.gamma import Gamma


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize(("p", "numbers"), [(1.0, [0.0, 4.0, torch.nan]), (2.0, [0.0, 16.0, torch.nan])])
def test_what_is_on_no_path_does_not_move(p, numbers, graded):
    """1 / sqrt(gamma) is 0 where gamma is 0, whether it is differentiated or not."""
    whole = ExtendedFloat(torch.tensor(numbers, requires_grad=graded))
    gamma = Gamma(Arithmetic(p, torch.float32), (3,), whole=whole)
    with contextlib.nullcontext() if graded else torch.no_grad():
        dead, live, unknown = gamma.gradient_to_z(torch.ones(3)).tolist()
        stored, _ = gamma.inverse_root()
    assert (dead, live) == (0.0, 0.25)
    assert stored.tolist()[:2] == [0.0, 0.25]
    # What is compared with zero is not above it; what is only divided by stays unknown.
    assert math.isnan(unknown) is not graded
