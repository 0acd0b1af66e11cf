"""What the tracer makes of a model: the report, what is written in place, and that it leaves no mark."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

import pathsgd
from support.networks import NETWORKS, Transformer, build, dense_gammas
from support.traced import Apply


def test_the_report_reads_as_a_table():
    model, x = build(Transformer)
    report = str(pathsgd.trace(model, x))
    lines = report.splitlines()
    assert lines[0].startswith("PathGraph of Transformer: 48 units can be rescaled; 93% of the weights lead")
    assert lines[1].startswith("On paths, for PathSGD: ")
    assert lines[2].split() == ["parameter", "shape", "role", "region", "path-normalised"]
    rows = {line.split()[0]: line for line in lines[4:] if line.split()}
    assert rows["layer.linear1.weight"].split()[1:5] == ["16x8", "weight", "0", "yes"]
    assert "layer_norm is not positively homogeneous" in report
    assert "softmax" in report


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(network, training, monkeypatch):
    model, x = build(network)
    model.train(training)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = {name: id(p) for name, p in model.named_parameters()}
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    flags = {name: module.training for name, module in model.named_modules()}
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda *_: pytest.fail("the model was copied"))
    graph = pathsgd.trace(model, x)
    dense_gammas(model, graph)
    monkeypatch.undo()
    assert flags == {name: module.training for name, module in model.named_modules()}
    assert identities == {name: id(p) for name, p in model.named_parameters()}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    for name, module in model.named_modules():
        assert {k: id(v) for k, v in module.__dict__.items()} == {
            k: id(v) for k, v in attributes[name].items()
        }
    if network.__name__ == "Recurrent":
        assert [id(w) for w in model.rnn._flat_weights] == [id(w) for w in model.rnn.parameters()]


@pytest.mark.parametrize("network", NETWORKS)
def test_train_and_eval_give_one_geometry(network):
    model, x = build(network)
    found = dense_gammas(model, pathsgd.trace(model.train(), x))
    expected = dense_gammas(model, pathsgd.trace(model.eval(), x))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_graph_pickles_and_copies():
    model, x = build(Transformer)
    graph = pathsgd.trace(model, x)
    for other in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert str(other) == str(graph)
        found, expected = dense_gammas(model, other), dense_gammas(model, graph)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert pathsgd.trace(model, graph) is graph


def test_wrappers_are_opened():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert set(pathsgd.trace(wrapped, torch.randn(1, 3)).parameters) == set(
            dict(model.named_parameters())
        )


def test_low_precision_models_are_measured_in_fp32():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 2))
    reduced = copy.deepcopy(model).bfloat16()
    expected = copy.deepcopy(reduced).float()
    assert pathsgd.path_norm(reduced).dtype == torch.float32
    assert torch.equal(pathsgd.path_norm(reduced), pathsgd.path_norm(expected))
    found = dense_gammas(reduced)
    assert all(torch.equal(found[n], g) for n, g in dense_gammas(expected).items())


def test_constants_written_in_the_code():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)

        def forward(self, x):
            gain = torch.tensor([[2.0, 0.5, 3.0], [1.0, -4.0, 1.0]], dtype=torch.float64).t()
            return self.b(self.a(x) * gain[1])

    model = Constant().double()
    expected = (model.b.weight.abs() * torch.tensor([0.5, 4.0])) @ model.a.weight.abs()
    assert torch.allclose(pathsgd.path_norm(model, torch.randn(2, 3).double(), p=1), expected.sum())


def test_autocast_does_not_lower_the_precision():
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 2))
    graph = pathsgd.trace(model)
    expected, gamma = pathsgd.path_norm(model, graph), dense_gammas(model, graph)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pathsgd.path_norm(model, graph), expected)
        found = dense_gammas(model, graph)
    assert all(torch.equal(found[name], gamma[name]) for name in gamma)


def test_repr_is_one_line():
    graph = pathsgd.trace(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert repr(graph) == "<PathGraph of Sequential: 4 of 4 parameters path-normalised, 1 region>"


class StochasticDepth(nn.Module):
    """Rolls dice in training mode, which export cannot follow."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.a(x).relu()
        if not (self.training and torch.rand([]) < 0.5):
            x = self.b(x).relu()
        return self.c(x)


def test_a_model_that_rolls_dice_in_training_mode(capfd):
    model = StochasticDepth()
    model.b.eval()
    graph = pathsgd.trace(model, torch.zeros(2, 4))
    assert all(info.normalised for info in graph.parameters.values())
    assert "could not be traced in training mode" in str(graph)
    assert (model.training, model.b.training) == (True, False)
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


def read_twice_what_is_written(y):
    z = y.mul_(2)
    return z + y


def write_through_a_view(y):
    y.view(-1).mul_(2)
    return y


def write_what_was_read_before(y):
    z = y * 3
    y.mul_(2)
    return z + y


def write_new_values(y):
    return (y + y).mul_(2).relu_().add_(y)


def make_a_tensor_of_a_number(y):
    return y * torch.tensor(2.0)


WRITES = {
    read_twice_what_is_written: (lambda y: 2 * y + 2 * y, False),
    write_through_a_view: (lambda y: 2 * y, True),
    write_what_was_read_before: (lambda y: 3 * y + 2 * y, True),
    make_a_tensor_of_a_number: (lambda y: 2 * y, False),
    write_new_values: (lambda y: 2 * (y + y).relu() + y, False),
}


@pytest.mark.parametrize("written", WRITES)
def test_what_is_written_in_place_is_what_it_says(written, monkeypatch):
    """And only where a value is read elsewhere is the program made functional, which takes a long time."""
    functional, needed = WRITES[written]
    made = []
    original = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram,
        "run_decompositions",
        lambda self, *args: made.append(self) or original(self, *args),
    )
    model, other = Apply(written), Apply(functional)
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, 4)
    assert torch.allclose(model(x), other(x))
    found = pathsgd.gammas(model, x)
    assert bool(made) == needed
    expected = pathsgd.gammas(other, x)
    for name in expected:
        assert torch.allclose(found[name].dense(), expected[name].dense())


def test_tensors_are_those_that_torch_names():
    """A parameter by its first name, a buffer by all, in torch's order; also of a module that is there
    twice."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
            self.last.weight = self.first.weight
            self.norms = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)])
            self.again, self.nothing = self.norms[0], None
            self.register_module("no_module", None)

        def forward(self, x):
            return self.last(self.again(self.norms[1](self.norms[0](self.first(x)))).relu())

    model = Tied().eval()
    found = pathsgd.trace(model, torch.ones(1, 3)).tensors(model)
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers(remove_duplicate=False))}
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in expected)
    assert "again.running_mean" in found
    assert not {"last.weight", "again.weight"} & set(found)


def test_a_parameter_that_is_read_through_a_kept_view_stays():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
            self.view = self.b.weight.detach().t()

        def forward(self, x):
            return self.b(self.a(x).relu() * self.view[:, 0])

    model, x = Kept(), torch.randn(5, 3)
    graph = pathsgd.trace(model, x)
    assert graph.parameters["b.weight"].reason == "outside: read through a view that the model keeps"
    with pytest.raises(pathsgd.RescaleError, match="no unit that can be rescaled"):
        pathsgd.unbalance(model, graph)


def test_units_that_are_returned_in_an_object_with_slots_stay():
    @dataclasses.dataclass(slots=True)
    class Output:
        hidden: torch.Tensor

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.a(x).relu()
            return self.b(h), Output(h)

    with pytest.raises(pathsgd.RescaleError, match="no unit that can be rescaled"):
        pathsgd.unbalance(Model(), torch.randn(5, 3))
