"""``compare``: the runs are those of a plain loop, and the same from a rescaled copy where they should be."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import pathsgd
import pathsgd_entry_point
from pathsgd.uses.short_training import default_loss

STEPS = 12


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)).double()


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


def sgd(*rates):
    return lambda model, graph, rate: torch.optim.SGD(model.parameters(), rate), rates


def test_a_run_is_that_of_a_plain_loop(model, data):
    loader, (x, y) = DataLoader(data, 32, shuffle=True), data[:20]
    found = pathsgd.compare(model, loader, [(x, y)], steps=STEPS, lr=[0.01]).find("AdamW")
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    batches = (batch for _ in range(STEPS) for batch in loader)
    for t in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.01 * min(t + 1, 0.5 + 0.5 * math.cos(math.pi * t / STEPS))
        optimizer.zero_grad()
        inputs, classes = next(batches)
        F.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
    assert found.loss == F.cross_entropy(model.eval()(x), y).item()


def test_rescaled_copies_begin_alike_and_balanced_ones_stay_alike(model, data):
    whole = [data[:]]
    methods = {
        "SGD": sgd(0.1),
        "BalancedMuon": (lambda model, graph, rate: pathsgd.BalancedMuon(model, graph), (None,)),
    }
    found = pathsgd.compare(model, whole, whole, methods=methods, steps=STEPS, rescaled=True)
    for method in methods:
        assert found.find(method).curve[0] == pytest.approx(
            found.find(method, rescaled=True).curve[0], rel=1e-9
        )
    assert found.find("BalancedMuon").loss == pytest.approx(
        found.find("BalancedMuon", rescaled=True).loss, rel=1e-9
    )
    assert found.find("SGD").loss != pytest.approx(found.find("SGD", rescaled=True).loss, rel=1e-3)


def test_neither_the_model_nor_random_numbers_change(model, data):
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.eval()
    pathsgd.compare(model, [data[:]], steps=2)
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_best_rate_is_first_and_a_run_that_diverges_last(model, data):
    found = pathsgd.compare(model, [data[:]], steps=40, methods={"SGD": sgd(1e300, 0.1, 1e-4)}, rescaled=True)
    assert found.metric == "training loss"
    assert [run.rate for run in found.runs] == [0.1, 1e-4, 1e300, 0.1]
    assert found.runs[2].loss == math.inf
    assert "at an end" not in str(found)
    found.draw()


def test_a_network_of_zeros_has_no_distance_to_balance(model, data):
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert "of the start nan" in str(pathsgd.compare(model, [data[:]], steps=2, methods={"SGD": sgd(0.1)}))


@pytest.mark.parametrize(
    ("rates", "tried"),
    [((1e-3, 1e-2), (0.1, 1, 10)), ((1e20, 1e10, 1e5), (1, 1e-5)), ((1e-9, 1e-8), (1e-7, 1e-6, 1e-5))],
)
def test_rates_beyond_the_best_are_tried(model, data, rates, tried):
    found = pathsgd.compare(model, [data[:]], steps=40, methods={"SGD": sgd(*rates)}, rescaled=True)
    assert {run.rate for run in found.runs} == {*rates, *tried}
    assert ("SGD: the best rate is at an end" in str(found)) == (rates[0] == 1e-9)


class Output:
    def __init__(self, loss):
        self.loss = loss


class WithLabels(nn.Linear):
    def forward(self, x, labels=None):
        outputs = super().forward(x)
        return outputs if labels is None else Output(F.mse_loss(outputs, labels))


def test_usual_batches_have_a_default_loss():
    torch.manual_seed(0)
    linear, x = WithLabels(4, 3), torch.randn(5, 4)
    y, classes = torch.randn(5, 3), torch.randint(3, (5,))
    assert torch.equal(default_loss(linear, (x, y)), F.mse_loss(linear(x), y))
    assert torch.equal(default_loss(linear, {"x": x, "labels": y}), F.mse_loss(linear(x), y))
    assert torch.equal(default_loss(linear, [x, classes]), F.cross_entropy(linear(x), classes))
    words, next_words = torch.randn(2, 7, 4), torch.randint(3, (2, 7))  # classes last
    expected = F.cross_entropy(linear(words).transpose(1, 2), next_words)
    torch.testing.assert_close(default_loss(linear, (words, next_words)), expected)
    with pytest.warns(UserWarning, match="balance changes nothing"):
        found = pathsgd.compare(linear, [{"x": x, "labels": y}], steps=2)
    assert "no unit of this model can be rescaled" in str(found)
    assert "BalancedMuon" in repr(found)
    assert found._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("batches", "loss", "part"),
    [
        ([], None, "there are no batches"),
        (iter([(torch.zeros(2, 6).double(), torch.zeros(2).long())]), None, "gone through only once"),
        ([torch.zeros(2, 6)], None, "a batch is a Tensor, not a dict or a pair x, y: give a loss"),
        ([{"input": torch.zeros(2, 6).double()}], None, "returned no loss of a batch with input: are labels"),
        ([torch.zeros(2, 6)], lambda model, batch: model[0].weight.sum(), "does not call the model"),
        (
            [(torch.zeros(2, 5), torch.zeros(2))],
            None,
            r"a tuple with tensors of \[\(2, 5\), ",
        ),
        ([(torch.zeros(2, 6).double(), torch.zeros(2, 1).double())], None, r"returned \(2, 3\) where y is"),
        ([{"x": torch.zeros(2, 6)}], None, "a dict of x with tensors .* raised TypeError: .*; give a loss"),
    ],
)
def test_what_cannot_be_trained_on_is_an_error(model, batches, loss, part):
    with pytest.raises(pathsgd.PathError, match=part):
        pathsgd.compare(model, batches, loss=loss, steps=4)


def test_validation_batches_and_rates_are_checked(model, data):
    for valid, part in (([], "no batches to validate on"), (iter([data[:]]), "gone through only once")):
        with pytest.raises(pathsgd.PathError, match=part):
            pathsgd.compare(model, [data[:]], valid, steps=2)
    with pytest.raises(pathsgd.PathError, match=r"above 0 and finite, not 0, 0\.1"):
        pathsgd.compare(model, [data[:]], lr=(0, 0.1), steps=2)


def test_a_loss_in_the_place_of_validation_batches_is_an_error(model, data):
    with pytest.raises(pathsgd.PathError, match="pass None, then the loss"):
        pathsgd.compare(model, [data[:]], default_loss)


class WithLogits(nn.Linear):
    def forward(self, x):
        output = Output(None)
        output.logits = super().forward(x)
        return output


def test_models_of_transformers_return_logits():
    model, x, y = WithLogits(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    assert torch.equal(default_loss(model, (x, y)), F.cross_entropy(model(x).logits, y))
    model.forward = lambda x: "text"
    with pytest.raises(pathsgd.PathError, match="returned a str, not a tensor"):
        default_loss(model, (x, y))


USER = """
import torch
from torch import nn

def make():
    x = torch.randn(20, 4)
    batches = [(x, (x[:, 0] > 0).long())]
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), batches, batches

def nothing():
    return nn.Linear(2, 2)

def fails():
    raise KeyError("no data")
"""


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_compared.py").write_text(USER)


@pytest.mark.usefixtures("user_file")
def test_the_command_prints_a_table_and_draws(tmp_path, capsys):
    arguments = ["compare", "user_compared.py:make", "--steps", "3", "--lr", "0.01", "--figure", "curves.png"]
    assert pathsgd_entry_point.main(arguments) == 0
    printed, errors = capsys.readouterr()
    assert [line.split(": ")[0] for line in errors.splitlines()] == [
        "AdamW, 0.01", "balance + AdamW, 0.01", "BalancedMuon"
    ]  # fmt: skip
    assert [line.split("  ")[0] for line in printed.splitlines()[2:-3]] == [
        "AdamW", "balance + AdamW", "BalancedMuon"
    ]  # fmt: skip
    assert "mu_{2,2} over that of the balanced network: of the start 1." in printed
    assert printed.splitlines()[0] == "Sequential, 3 steps, validation loss"
    assert (tmp_path / "curves.png").is_file()


@pytest.mark.usefixtures("user_file")
@pytest.mark.parametrize(
    ("name", "part"), [("nothing", "returned a Linear: return a tuple"), ("fails", "raised KeyError")]
)
def test_the_command_answers_mistakes_in_a_line(name, part, capsys):
    assert pathsgd_entry_point.main(["compare", f"user_compared.py:{name}"]) == 1
    errors = capsys.readouterr().err
    assert part in errors
    assert errors.count("\n") == 1
