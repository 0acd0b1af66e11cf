"""``benchmarks/uses/folding``, in small: a network for the digits, trained for a moment."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import pathsgd
from benchmarks.league.tasks import digits
from benchmarks.networks import ResNet
from benchmarks.uses import folding
from benchmarks.uses.folding import fine_tune, make_optimizer
from benchmarks.uses.networks import fold


@pytest.fixture(scope="module")
def task():
    return replace(digits("cpu"), steps=30, batch=64)


@pytest.fixture(scope="module")
def trained(task):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    for _ in fine_tune(model, torch.optim.AdamW(model.parameters(), 1e-2), task, seed=0):
        pass
    return model.eval()


def test_one_call_of_torch_folds_a_residual_network_and_balance_reads_it():
    torch.manual_seed(0)
    model, x = ResNet(4, (1, 1), classes=10), torch.randn(8, 3, 32, 32)
    for _ in range(5):
        model(x)  # for the running statistics
    folded = fold(model.eval())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    before = pathsgd.imbalance(folded, x[:1]).ratio
    pathsgd.balance(folded, x[:1])
    assert pathsgd.imbalance(folded, x[:1]).ratio < 1.001 < before
    torch.testing.assert_close(folded(x), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bias", [0.0, -1.0, 1.0])
@pytest.mark.parametrize("weight", [0.0, 1e-12])
def test_channels_that_training_has_switched_off(trained, task, weight, bias):
    model, x = copy.deepcopy(trained), task.x[:50]
    with torch.no_grad():
        model[1].weight[:3], model[1].bias[:3] = weight, bias
    folded = fold(model)
    pathsgd.balance(folded, task.example)
    assert all(parameter.isfinite().all() for parameter in folded.parameters())
    torch.testing.assert_close(folded(x), model(x), rtol=1e-3, atol=1e-4)


def test_after_balance_training_does_not_depend_on_how_a_folded_network_was_scaled(trained, task):
    task = replace(task, steps=3)

    def distance(prepare):
        one, other = fold(trained), fold(trained)
        generator = torch.Generator().manual_seed(0)
        pathsgd.unbalance(other, task.example, powers_of_two=True, generator=generator)
        for model in (one, other):
            prepare(model)
            for _ in fine_tune(model, make_optimizer(model, 1e-3, task.example), task, seed=0):
                pass
        return (one(task.x) - other(task.x)).abs().max()

    assert distance(lambda model: pathsgd.balance(model, task.example)) == 0
    assert distance(lambda model: None) > 0.1


def test_every_start_is_fine_tuned_and_summed_up(trained, task, tmp_path, monkeypatch, capsys):
    class Small:
        label = "small"

        def load(self):
            return copy.deepcopy(trained)

    monkeypatch.setattr(folding, "NETWORKS", {"small": Small()})
    monkeypatch.setattr(folding, "SEEDS", {"small": 2})
    monkeypatch.setattr(folding, "FIGURES", tmp_path)
    rows = list(folding.measure("small", replace(task, steps=2)))
    starts = [row for row in rows if row.get("start") and "seed" not in row]
    assert starts[0]["loss"] == pytest.approx(starts[1]["loss"], rel=1e-3)
    for start in folding.STARTS:
        best = folding.best_rate(rows, "small", start)
        for rate in {folding.USUAL, best} | ({None} if start != folding.STARTS[2] else set()):
            assert len(folding.runs_of(rows, "small", start, rate)) == 2
    capsys.readouterr()
    folding.tabulate(rows)
    assert capsys.readouterr().out.count("±") == 3 * 2 + 2 + 1
    folding.draw(rows)
    assert (tmp_path / "uses-folding.png").stat().st_size < 80_000
