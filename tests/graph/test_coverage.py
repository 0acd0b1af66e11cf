"""A part of the table of ``python -m benchmarks.coverage``: what it promises of every network."""

from __future__ import annotations

import pytest
import torch

from benchmarks.coverage.measure import change, measure
from benchmarks.coverage.models import build

FAST = ("MLP", "split and cat", "nn.MultiheadAttention", "gate: SwiGLU by chunk", "OPT", "ViT")


@pytest.mark.parametrize("name", FAST)
def test_its_symmetries_are_kept(name):
    row = measure(name)
    assert not row.error
    assert row.one_side > 0.5
    assert row.unbalanced < 1e-10
    assert row.balanced < 1e-10
    assert row.agree < 1e-9
    assert row.steps < 1e-9


@pytest.mark.parametrize("name", ["MLP", "gate: SwiGLU by chunk"])
def test_a_wrong_symmetry_would_be_seen(name):
    """Every row of every matrix matters: no weight is left at a value that hides a mistake."""
    model, inputs = build(name)
    for parameter in list(model.parameters()):
        with torch.no_grad():
            before = parameter.clone()
            other, _ = build(name)
            for row in range(len(parameter)):
                parameter[row] *= 3
                assert change(model, other, inputs) > 1e-6
                parameter.copy_(before)


def test_an_error_is_a_row():
    row = measure("Mixtral, experts in a loop")
    assert row.error.startswith("DataDependentError: tracing failed in 'model.layers.0.mlp.experts'")
    assert row.weights > 0
    assert row.one_side is None


def test_what_takes_too_long_is_a_row():
    assert measure("OPT", limit_s=0.01).error == "stopped after 0.01 s"
