"""A part of the table of ``python -m benchmarks.coverage``: what it promises of every network."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import pathsgd
from benchmarks.coverage.measure import change, measure
from benchmarks.coverage.models import BUILDERS, build
from pathsgd.graph.unit_classes import unit_classes_of

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


INTO = {"up_proj", "gate_up_proj", "v_proj", "kv_b_proj", "q_proj", "q_b_proj", "k_proj"}
OUT_OF = {"down_proj", "o_proj"}
"""Rows of these move, and columns of these."""
DECODERS = {
    "Llama": set(), "Mistral": set(), "Gemma 2": set(), "Mixtral": set(),
    "DeepSeek-V3": {"k_proj"},  # has no matrix of that name
    "Qwen3": {"q_proj", "k_proj"}, "OLMo-2": {"q_proj", "k_proj"},  # which are normalised
    "GPT-OSS": {"down_proj"},  # experts clamp both branches
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_what_moves_in_a_decoder(name):
    """Rows, or columns, change by factors of their own under unbalance, if all units are hit."""
    model, inputs = build(name)
    graph = pathsgd.trace(model, inputs)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    pathsgd.unbalance(model, graph, units=20 * len(unit_classes_of(graph).free), generator=generator)
    seen = set()
    for parameter_name, p in model.named_parameters():
        kind = next((k for k in INTO | OUT_OF if f".{k}." in f".{parameter_name}."), None)
        if kind is None or p.dim() < 2:
            continue
        seen.add(kind)
        octaves = (p / before[parameter_name]).abs().log2()
        by_unit = octaves.mean(-1 if kind in INTO else -2)  # columns change all rows alike
        assert (by_unit.std() > 1) == (kind not in DECODERS[name]), parameter_name
    assert seen >= OUT_OF


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


def test_what_takes_too_long_is_a_row(monkeypatch):
    monkeypatch.setitem(BUILDERS, "slow", lambda: time.sleep(60))
    assert measure("slow", limit_s=0.01).error == "stopped after 0.01 s"
