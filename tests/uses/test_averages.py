"""``benchmarks/uses/averages``, in small: networks for the digits."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.league.tasks import digits
from benchmarks.uses import averages
from benchmarks.uses.averages import average_weights, balanced, equalised, interpolate, rescaled, run


@pytest.fixture(scope="module")
def task():
    return replace(digits("cpu"), steps=100, batch=64)


@pytest.fixture(scope="module")
def trained(task):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    (*_, model) = run(model, task, 1e-2, seed=0)
    return model


@pytest.fixture(scope="module")
def members(trained, task):
    return [list(run(copy.deepcopy(trained), task, 1e-3, seed))[-1] for seed in (1, 2, 3)]


def loss(model, task):
    return task.evaluate(model, "test")["loss"]


CHANGES = {
    "rescaled": lambda model, task: rescaled(model, task.example, seed=0),
    "equalised": lambda model, task: equalised(model, task.example),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_network_and_its_rescaled_copy_have_themselves_as_average_once_balanced(trained, task, change):
    pair = [trained, change(trained, task)]
    scores = trained(task.x)
    torch.testing.assert_close(pair[1](task.x), scores, rtol=1e-3, atol=1e-3)
    assert (average_weights(pair)(task.x) - scores).abs().max() > 0.1
    after = average_weights(balanced(pair, task.example))(task.x)
    torch.testing.assert_close(after, scores, rtol=1e-3, atol=1e-3)


def test_soups_of_balanced_members_do_not_depend_on_who_was_rescaled(members, task):
    changed = [*members[:2], rescaled(members[2], task.example, seed=0)]
    as_they_are = loss(average_weights(members), task)
    assert loss(average_weights(changed), task) > 1.2 * as_they_are
    after = [loss(average_weights(balanced(some, task.example)), task) for some in (members, changed)]
    assert after[0] == after[1]  # powers of two leave no trace
    assert after[0] == pytest.approx(as_they_are, rel=0.1)


def test_balanced_is_a_copy(trained, task):
    before = copy.deepcopy(trained.state_dict())
    balanced([trained], task.example)
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())


def test_averages_are_what_their_formulas_say(members):
    weights = [member[1].weight for member in members]
    torch.testing.assert_close(average_weights(members)[1].weight, sum(weights) / 3)
    expected = 0.8 * (0.8 * weights[0] + 0.2 * weights[1]) + 0.2 * weights[2]
    torch.testing.assert_close(average_weights(members, decay=0.8)[1].weight, expected)
    middle = interpolate(members[0], members[1], 0.5)
    torch.testing.assert_close(middle[1].weight, (weights[0] + weights[1]) / 2)


def test_everything_is_measured_and_summed_up(trained, task, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(averages, "make_start", lambda *_: copy.deepcopy(trained))
    monkeypatch.setattr(averages, "SOUPS", {"vgg": 1})
    monkeypatch.setattr(averages, "FIGURES", tmp_path)
    rows = list(averages.measure("vgg", replace(task, steps=10)))
    assert [row["case"] for row in rows if "case" in row] == list(averages.CASES.values())
    lines = {row["line"]: row["losses"] for row in rows if "line" in row}
    ends = [[losses[0], losses[-1]] for losses in lines.values()]
    assert all(pair == pytest.approx(ends[0], rel=1e-3) for pair in ends)
    capsys.readouterr()
    averages.tabulate(rows)
    assert capsys.readouterr().out.count("\n") == 2 + len(averages.CASES)
    averages.draw(rows)
    assert (tmp_path / "uses-averages.png").stat().st_size < 80_000
