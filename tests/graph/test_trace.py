"""What the tracer makes of a model: regions, reasons, the report, and that it leaves no mark."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import pathsgd
from support.networks import NETWORKS, Transformer, build, dense_gammas


def normalised(graph):
    return {name for name, info in graph.parameters.items() if info.normalised}


class Apply(nn.Module):
    """Linear - function - Linear."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.b(self.function(self.a(x)))


@pytest.mark.parametrize(
    "function",
    [F.gelu, torch.sigmoid, torch.tanh, F.relu6, F.silu, F.elu, F.softplus, F.hardtanh, F.glu,
     lambda x: torch.softmax(x, -1), lambda x: F.layer_norm(x, (4,)), lambda x: F.normalize(x),
     lambda x: x * torch.sigmoid(x), lambda x: x.clamp(-1, 1), lambda x: x / x.sum(), torch.exp,
     lambda x: x[:, :2] * x[:, 2:], lambda x: x**3],
)  # fmt: skip
def test_what_is_not_homogeneous_ends_the_region(function):
    model = Apply(function)
    if function is F.glu or model.function(torch.ones(1, 4)).shape[1] == 2:
        model.b = nn.Linear(2, 4)
    graph = pathsgd.trace(model, torch.randn(2, 4))
    assert normalised(graph) == set()
    assert "alone on its paths" in graph.parameters["a.weight"].reason
    assert len(graph.boundaries) >= 1
    assert "Regions end" in str(graph)
    gamma = dense_gammas(model, graph)  # 2 where the function reads a unit twice
    assert all(value.eq(value.flatten()[0]).all() for value in gamma.values())


@pytest.mark.parametrize(
    "function",
    [F.relu, F.leaky_relu, torch.abs, F.rrelu, lambda x: F.threshold(x, 0, 0), lambda x: x.clamp(min=0),
     lambda x: F.dropout(x, 0.5), lambda x: torch.maximum(x, -x), lambda x: x.double().float(),
     lambda x: x.masked_fill(x > 1, 0), lambda x: x.movedim(1, 0).t(), lambda x: x.roll(1, 1),
     lambda x: x.relu_().add_(x), lambda x: x.unbind(1)[0][:, None].repeat(1, 4),
     lambda x: x.reshape(-1, 2, 2).max(2).values.repeat(1, 2), lambda x: x.relu().square()],
)  # fmt: skip
def test_what_is_homogeneous_does_not(function):
    model = Apply(function)
    graph = pathsgd.trace(model, torch.randn(2, 4))
    assert normalised(graph) == set(graph.parameters), str(graph)
    pathsgd.path_norm(model, graph)


def test_the_report_reads_as_a_table():
    model, x = build(Transformer)
    report = str(pathsgd.trace(model, x))
    lines = report.splitlines()
    assert lines[0].startswith("PathGraph of Transformer: ")
    assert lines[1].split() == ["parameter", "shape", "role", "region", "path-normalised"]
    rows = {line.split()[0]: line for line in lines[3:] if line.split()}
    assert rows["layer.linear1.weight"].split()[1:5] == ["16x8", "weight", "0", "yes"]
    assert "layer_norm is not positively homogeneous" in report
    assert "softmax" in report


def test_values_and_output_projection_share_a_region():
    """Rescaling a value channel and its column of the output projection changes nothing; gamma follows."""
    model, x = build(Transformer)
    graph = pathsgd.trace(model, x)
    before, gamma = model(x).detach(), dense_gammas(model, graph)
    channel = 3
    value_row = 2 * 8 + channel
    pathsgd.rescale(model, graph, {("layer.self_attn.in_proj_weight", value_row): 4.0})
    assert torch.allclose(before, model(x), rtol=1e-10)
    after = dense_gammas(model, graph)
    rows = gamma["layer.self_attn.in_proj_weight"] / after["layer.self_attn.in_proj_weight"]
    columns = after["layer.self_attn.out_proj.weight"] / gamma["layer.self_attn.out_proj.weight"]
    assert torch.allclose(rows[value_row], torch.full((8,), 16.0).double())
    assert torch.allclose(columns[:, channel], torch.full((8,), 16.0).double())
    with pytest.raises(pathsgd.RescaleError, match="cannot be rescaled"):
        pathsgd.rescale(model, graph, {("layer.self_attn.in_proj_weight", 0): 4.0})


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


@pytest.mark.parametrize("network", NETWORKS)
def test_the_batch_does_not_count(network):
    model, x = build(network)
    one = dense_gammas(model, x[:1])
    for batch in (x, x.repeat(4, *(1,) * (x.dim() - 1)), x[:0]):
        found = dense_gammas(model, batch)
        assert all(torch.equal(found[name], one[name]) for name in one)


def test_positions_do_count():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    one = dense_gammas(model, torch.randn(2, 1, 3))["0.weight"]
    five = dense_gammas(model, torch.randn(2, 5, 3))["0.weight"]
    assert torch.allclose(five, 5 * one)


def test_a_graph_pickles_and_copies():
    model, x = build(Transformer)
    graph = pathsgd.trace(model, x)
    for other in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert str(other) == str(graph)
        found, expected = dense_gammas(model, other), dense_gammas(model, graph)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert pathsgd.trace(model, graph) is graph


def test_keyword_inputs_and_several_inputs_and_outputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.out = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

        def forward(self, x, *, y, flag=True):
            h = (self.left(x) + self.right(y)).relu()
            return {"out": self.out(h), "hidden": [h]} if flag else h

    model = Pair().double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    graph = pathsgd.trace(model, {"x": x, "y": y})
    assert normalised(graph) == set(graph.parameters)
    assert [tuple(t.shape) for t in pathsgd.path_norm(model, graph, per_output=True)] == [(1, 2), (1, 4)]
    gamma = dense_gammas(model, graph)
    expected = (model.out.weight**2).sum(0) + 1  # the hidden units are outputs too
    assert torch.allclose(gamma["left.bias"], expected.detach())


def test_frozen_shared_and_unused_parameters():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.unused = nn.Parameter(torch.ones(2))
            self.c.weight.requires_grad_(False)

        def forward(self, x):
            return self.c(self.b(self.a(x).relu()).relu())

    graph = pathsgd.trace(Odd(), torch.randn(1, 3))
    assert graph.parameters["a.weight"].aliases == ("b.weight",)
    assert graph.parameters["unused"].reason == "not used by the forward pass"
    assert not graph.parameters["c.weight"].trainable
    assert "a.weight = b.weight" in str(graph)
    assert "yes (frozen)" in str(graph)


def test_computed_weights():
    """A pruning mask is a fixed factor on an edge; weight norm and LoRA in one matrix are outside."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    prune.random_unstructured(model[0], "weight", 0.5)
    graph = pathsgd.trace(model, torch.randn(1, 4).double())
    assert normalised(graph) == set(graph.parameters)
    gamma = dense_gammas(model, graph)["0.weight_orig"]
    assert torch.equal(gamma == 0, model[0].weight_mask == 0)
    assert type(model[0].weight) is torch.Tensor

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    parametrizations.weight_norm(model[2])
    graph = pathsgd.trace(model, torch.randn(1, 4))
    reason = graph.parameters["2.parametrizations.weight.original1"].reason
    assert reason.startswith("outside: a weight computed by")
    assert normalised(graph) == {"2.bias", "4.weight", "4.bias"}

    class Lora(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

        def forward(self, x):
            return F.linear(x, self.weight + self.up @ self.down, self.bias)

    graph = pathsgd.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Lora()), torch.randn(1, 4))
    assert graph.parameters["2.down"].status is pathsgd.ParameterStatus.OUTSIDE

    class TwoSteps(Lora):
        def forward(self, x):
            return super(Lora, self).forward(x) + x @ self.down.t() @ self.up.t() * 0.5

    graph = pathsgd.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), TwoSteps()), torch.randn(1, 4))
    assert normalised(graph) == set(graph.parameters)


def test_wrappers_are_opened():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert set(pathsgd.trace(wrapped, torch.randn(1, 3)).parameters) == set(
            dict(model.named_parameters())
        )


def test_an_example_on_another_device_will_do():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to("meta")
    assert normalised(pathsgd.trace(model, torch.randn(1, 3))) == set(dict(model.named_parameters()))


class Convolution(nn.Module):
    """Rolls dice in training mode if it is told to, which export cannot follow."""

    def __init__(self, dice=False):
        super().__init__()
        self.dice, self.a, self.b = dice, nn.Conv1d(1, 3, 3), nn.Linear(6, 2)

    def forward(self, x):
        x = self.a(x).relu()
        if self.dice and self.training and torch.rand([]) < 0.5:
            x = 2 * x
        return self.b(x.flatten(1))


@pytest.mark.parametrize("dice", [False, True])
@pytest.mark.parametrize(
    ("precision", "other"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_an_example_in_another_precision_will_do(dice, precision, other):
    model, x = Convolution(dice).to(precision), torch.zeros(2, 1, 4)
    assert str(pathsgd.trace(model, x.to(other))) == str(pathsgd.trace(model, x.to(precision)))


def test_the_error_is_not_about_precision_if_that_was_not_all():
    with pytest.raises(pathsgd.TraceError, match=r"'b' \(Linear\)"):
        pathsgd.trace(Convolution().bfloat16(), torch.zeros(2, 1, 5))


class TakesDouble(nn.Module):
    """Casts by itself, and would not take an input that was cast before."""

    def __init__(self):
        super().__init__()
        self.smooth, self.a = nn.Conv1d(1, 1, 3).double().requires_grad_(False), Convolution()
        self.first = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.a(self.smooth(x).float() * self.first)


def test_an_example_that_will_do_is_not_cast():
    graph = pathsgd.trace(TakesDouble(), torch.zeros(2, 1, 6, dtype=torch.float64))
    assert {"a.a.weight", "a.b.weight"} <= normalised(graph)


def test_low_precision_models_are_measured_in_fp32():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 2))
    reduced = copy.deepcopy(model).bfloat16()
    expected = copy.deepcopy(reduced).float()
    assert pathsgd.path_norm(reduced).dtype == torch.float32
    assert torch.equal(pathsgd.path_norm(reduced), pathsgd.path_norm(expected))
    found = dense_gammas(reduced)
    assert all(torch.equal(found[n], g) for n, g in dense_gammas(expected).items())


def test_a_batch_that_is_fixed_in_the_code_is_said_so():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(x).view(5, 4).relu())

    assert "could not be cut" in str(pathsgd.trace(Fixed(), torch.randn(5, 3)))
    unbatched = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    assert "could not be cut" in str(pathsgd.trace(unbatched, torch.randn(3, 8, 8)))
    assert "could not be cut" not in str(pathsgd.trace(unbatched, torch.randn(3, 8, 8), batch_dim=None))


def test_time_first_layers_are_pointed_out():
    """Whether axis 0 is time or batch cannot be seen from outside, so the report says how to say it."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 2))
    graph = pathsgd.trace(model, torch.randn(5, 3, 8))
    assert "'0' (TransformerEncoderLayer) takes time first" in str(graph)
    assert "batch_dim=1" in str(graph)
    assert not pathsgd.trace(model, torch.randn(5, 3, 8), batch_dim=1).notes


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


def test_integers_begin_paths_where_they_become_floats():
    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

        def forward(self, x):
            return self.net(x.float() / 255)

    graph = pathsgd.trace(Pixels(), torch.zeros(2, 4, dtype=torch.uint8))
    assert normalised(graph) == set(graph.parameters), str(graph)


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


def test_the_status_of_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1, bias=False)
            self.temperature, self.spare = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2))

        def forward(self, x):
            x = self.second(torch.relu(self.first(x)))
            return self.last(torch.tanh(x * self.temperature.exp()))

    found = pathsgd.trace(Model(), torch.ones(1, 2)).parameters
    status = pathsgd.ParameterStatus
    assert {name: info.status for name, info in found.items()} == {
        **dict.fromkeys(["first.weight", "first.bias", "second.weight", "second.bias"], status.NORMALISED),
        "last.weight": status.ALONE,
        "temperature": status.OUTSIDE,
        "spare": status.UNUSED,
    }
    assert all(bool(info.reason) != info.normalised for info in found.values())


def test_only_the_shape_of_an_ignored_argument_matters():
    """zeros_like and expand_as read nothing of their argument, so its paths do not end there."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x):
            hidden = torch.relu(self.first(x))
            hidden = hidden + torch.zeros_like(hidden) + hidden.expand_as(hidden)
            return self.last(hidden)

    graph = pathsgd.trace(Model(), torch.ones(1, 2))
    assert graph.boundaries == ()
    assert normalised(graph) == set(graph.parameters)


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
