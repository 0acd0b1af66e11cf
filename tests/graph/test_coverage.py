"""A part of the table of ``python -m benchmarks.coverage``: what it promises of every network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.coverage.measure import change, measure
from benchmarks.coverage.models import BUILDERS, build

FAST = (
    "MLP", "split and cat", "nn.MultiheadAttention", "gate: SwiGLU by chunk", "gate: ReGLU", "OPT", "ViT",
    "Llama", "Qwen3-MoE",
)  # fmt: skip


@pytest.mark.parametrize("name", FAST)
def test_its_symmetries_are_kept(name):
    row = measure(name)
    assert not row.error
    assert row.one_side > 0.6
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


def test_an_error_is_a_row(monkeypatch):
    class Branches(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    monkeypatch.setitem(BUILDERS, "branches", lambda: (Branches(2, 2), torch.ones(1, 2)))
    row = measure("branches")
    assert row.error.startswith("DataDependentError: tracing failed in Branches")
    assert row.weights > 0
    assert row.one_side is None


def test_what_takes_too_long_is_a_row():
    assert measure("OPT", limit_s=0.01).error == "stopped after 0.01 s"
