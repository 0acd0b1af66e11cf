"""A part of the table of ``python -m benchmarks.coverage``: what it promises of every network."""

from __future__ import annotations

import pytest

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
    """Nearly every row of every parameter matters; a ReLU that is never active does not."""
    model, inputs = build(name)
    other, _ = build(name)
    changes = []
    for parameter in model.parameters():
        for row in parameter.detach():
            before = row.clone()
            row *= 3
            changes.append(change(model, other, inputs))
            row.copy_(before)
    assert sum(x < 1e-6 for x in changes) <= len(changes) / 20


def test_an_error_is_a_row():
    row = measure("Mixtral, experts in a loop")
    assert row.error.startswith("DataDependentError: tracing failed in 'model.layers.0.mlp.experts'")
    assert row.weights > 0
    assert row.one_side is None


def test_what_takes_too_long_is_a_row():
    assert measure("OPT", limit_s=0.01).error == "stopped after 0.01 s"
