"""``pathsgd bench``: it times the user's model with every optimizer, and changes nothing."""

from __future__ import annotations

import json

import pytest

import pathsgd_entry_point
from pathsgd.cli.bench import METHODS

MODELS = """
import torch
from torch import nn


def mlp(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens):
        return {"logits": self.head(self.embedding(tokens).relu()), "hidden": (None, tokens)}


instance = mlp()
"""


@pytest.fixture
def models(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path / "models.py"


def bench(capsys, target, *options):
    assert pathsgd_entry_point.main(["bench", target, "--device", "cpu", "--seconds", "0.001", *options]) == 0
    return capsys.readouterr().out


def test_every_optimizer_is_timed_beside_torchs(models, capsys):
    shape = ("--input-shape", "3,4")
    lines = bench(capsys, f"{models}:mlp", *shape).splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == list(METHODS)
    assert "of SGD" in lines[3]
    assert "of AdamW" in lines[-1]


def test_outputs_in_dicts_and_inputs_that_are_indices(models, capsys):
    options = ("--input-shape", "2,5", "--input-dtype", "int64", "--autocast", "--json")
    report = json.loads(bench(capsys, f"{models}:Tokens", *options, "--methods", "SGD", "BalancedMuon"))
    assert set(report["microseconds"]) == {"step", "optimizer"}
    assert all(t > 0 for times in report["microseconds"].values() for t in times.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "bench needs --input-shape"), (["--input-shape", "1,4", "--cuda-graph"], "needs --device cuda")],
)
def test_errors_are_one_line(models, capsys, options, message):
    assert pathsgd_entry_point.main(["bench", f"{models}:mlp", "--device", "cpu", *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
