"""Norms and inner products of blocks: as exact as in fp64, whatever their layout, size and range."""

from __future__ import annotations

import pytest
import torch
from pathsgd.optim.relative import sums
from pathsgd.optim.relative.sums import LARGE, find_norms, measure_turn

SHAPES = [(5,), (3, 4), (300, 200), (200, 20, 3, 3), (LARGE + 1,), (1, 2 * LARGE), (2, 2 * LARGE), (0, 3)]


def expected_norm(tensor):
    return torch.linalg.vector_norm(tensor.double())


def lay_out(tensor, layout):
    if layout == "transposed" and tensor.dim() == 2:
        return tensor.mT.contiguous().mT
    if layout == "channels last" and tensor.dim() == 4:
        return tensor.to(memory_format=torch.channels_last)
    return tensor


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last"])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_those_of_fp64(shape, layout):
    tensor = lay_out(torch.randn(shape), layout)
    (found,) = find_norms([], [tensor])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected_norm(tensor), rtol=1e-8, atol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, 1e-20, 1e-13, 1e18, 1e30])
def test_no_square_is_lost(scale):
    tensor = torch.randn(300, 200) * scale
    tensor[1] *= 1e-3
    (found,) = find_norms([], [tensor])
    torch.testing.assert_close(found, expected_norm(tensor), rtol=1e-7, atol=0)


def test_what_is_not_a_number_stays_so():
    tensor = torch.randn(300, 200)
    tensor[3, 4] = torch.nan
    found = find_norms([], [tensor, torch.ones(300, 200)])
    assert found.isnan().tolist() == [True, False]


@pytest.mark.parametrize("shape", SHAPES)
def test_turns_are_measured_as_in_fp64(shape):
    g, u, step = torch.randn(3, *shape).unbind()
    expected = (g.double() * u.double()).sum(), expected_norm(u), expected_norm(u + step)
    found = measure_turn([], [g], [u], [step])
    scale = float(expected_norm(g) * expected[1])
    torch.testing.assert_close(found[0][0], expected[0], rtol=0, atol=1e-7 * scale)
    for own, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(own[0], other, rtol=1e-7, atol=0)


def test_large_tensors_are_summed_by_rows(monkeypatch):
    """fp64 takes ten times as long."""
    calls = []
    monkeypatch.setattr(
        sums, "foreach", lambda _, tensors, *a, **b: calls.append(tensors) or [torch.ones(())]
    )
    find_norms([], [torch.ones(300, 200)])
    assert calls[0][0].shape == (300,)
