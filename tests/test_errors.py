"""Bad input: one clear exception that names what is wrong and what to do, and the model untouched."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import pathsgd
from support.networks import Mlp, Recurrent, SmallResNet, build, dense_gammas


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(3, 3)])
        self.choice = Choice()

    def forward(self, x):
        return self.choice(self.inner[0](x))


class Choice(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("make", "example", "message"),
    [
        (mlp, torch.randn(2, 5), r"'0' \(Linear\).*check that example_input \[\(2, 5\)\]"),
        (mlp, (torch.randn(2, 3), torch.randn(2, 3)), "check that example_input"),
        (mlp, {"z": torch.randn(2, 3)}, "check that example_input"),
        (Branches, torch.randn(2, 3), r"'choice' \(Choice\).*control flow or its sizes depend on values"),
        (nn.ReLU, torch.randn(2, 3), "ReLU has no parameters"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), torch.randn(2, 3), "'0.weight' is lazy.*run the model"),
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), torch.randn(2, 3), "'weight' is complex"),
        (lambda: torch.ones(3), torch.randn(2, 3), "expected an nn.Module, got Tensor"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), None, "pass a tensor of the shape"),
    ],
)
def test_models_and_examples_that_cannot_be_traced(make, example, message):
    model = make()
    state = (
        copy.deepcopy(model.state_dict()) if isinstance(model, nn.Module) and "lazy" not in message else {}
    )
    with pytest.raises(pathsgd.TraceError, match="(?s)" + message):
        pathsgd.trace(model, example)
    for name, tensor in state.items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_sparse_parameters():
    model = mlp()
    model[0].weight = nn.Parameter(torch.eye(4, 3).to_sparse())
    with pytest.raises(pathsgd.TraceError, match=r"'0.weight' has layout torch.sparse_coo.*to_dense"):
        pathsgd.trace(model, torch.randn(1, 3))


@pytest.mark.parametrize("p", [0.5, 0, -1, float("nan")])
def test_p_below_one(p):
    for measure in (pathsgd.path_norm, pathsgd.group_norm, pathsgd.gammas, pathsgd.balance):
        with pytest.raises(pathsgd.PathError, match="Invalid p"):
            measure(mlp(), None, p)
    with pytest.raises(pathsgd.PathError, match="Invalid q"):
        pathsgd.group_norm(mlp(), q=0.5)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({("4", 0): 2.0}, "unit 0 of '4' cannot be rescaled: it is an output"),
        ({("0", 8): 2.0}, "'0' has units 0 to 7; there is no unit 8"),
        ({("0", -1): 2.0}, "there is no unit -1"),
        ({("nowhere", 0): 2.0}, "no unit of 'nowhere'; units that can be rescaled belong to"),
        ({("0", 0): 0.0}, "Invalid factor"),
        ({("0", 0): -1.0}, "Invalid factor"),
        ({("0", 0): float("inf")}, "Invalid factor"),
        ({"0": torch.ones(3)}, "has 8 units but 3 factors"),
        ({"4": torch.full((4,), 2.0)}, "cannot be rescaled"),
        ({("0", 0): 3.0, ("4", 1): 2.0}, "cannot be rescaled"),
    ],
)
def test_units_that_cannot_be_rescaled(factors, message):
    model, x = build(Mlp)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(pathsgd.RescaleError, match=message):
        pathsgd.rescale(model, x, factors)
    assert all(map(torch.equal, before, model.parameters()))


def test_units_before_a_norm_and_units_with_two_names():
    model, x = build(SmallResNet)
    with pytest.raises(pathsgd.RescaleError, match="cannot be rescaled"):
        pathsgd.rescale(model, x, {("stages.0.conv1", 0): 2.0})
    model, x = build(Recurrent)
    with pytest.raises(pathsgd.RescaleError, match=r"several kinds of units.*'rnn.weight_ih_l0'"):
        pathsgd.rescale(model, x, {("rnn", 0): 2.0})


def test_factors_beyond_the_dtype_change_nothing():
    model = mlp().half()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(pathsgd.RescaleError, match=r"'0\.weight' out of the range of torch.float16"):
        pathsgd.rescale(model, None, {("0", 0): 1e6})
    assert all(map(torch.equal, before, model.parameters()))


def test_a_model_that_changed_since_it_was_traced():
    model = mlp()
    graph = pathsgd.trace(model)
    model[2] = nn.Linear(4, 7)
    with pytest.raises(pathsgd.PathError, match=r"'2.weight' has shape \(7, 4\).*trace it again"):
        pathsgd.path_norm(model, graph)
    model[2] = nn.Linear(4, 2, bias=False)
    with pytest.raises(pathsgd.PathError, match=r"no parameter '2.bias' any more"):
        pathsgd.path_norm(model, graph)
    model = mlp()
    model.extra = nn.Linear(1, 1)
    with pytest.raises(pathsgd.PathError, match=r"'extra.bias' that it did not have"):
        pathsgd.path_norm(model, graph)


def test_the_norm_of_several_regions_must_say_which():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    with pytest.raises(pathsgd.PathError, match=r"2 regions .*sigmoid.*region=k, with k from 0 to 1"):
        pathsgd.path_norm(model)
    expected = (model[0].weight.pow(2).sum() + model[0].bias.pow(2).sum()).sqrt()
    assert torch.allclose(pathsgd.path_norm(model, region=0), expected)
    with pytest.raises(pathsgd.PathError, match="there is no region 2"):
        pathsgd.path_norm(model, region=2)


def test_time_first_recurrences_ask_for_their_batch_axis():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.RNN(3, 4, nonlinearity="relu"), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model, x = TimeFirst(), torch.randn(5, 2, 3)
    with pytest.raises(pathsgd.TraceError, match="batch_dim=1"):
        pathsgd.trace(model, x)
    graph = pathsgd.trace(model, x, batch_dim=1)
    expected = TimeFirst()
    expected.rnn = nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
    expected.load_state_dict(model.state_dict())
    found = dense_gammas(model, graph)
    for name, gamma in dense_gammas(expected, x.transpose(0, 1)).items():
        assert torch.allclose(found[name], gamma)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_diverged(value):
    model = mlp()
    model[0].weight.data[0, 0] = value
    with pytest.raises(pathsgd.PathError, match=r"'0.weight' holds nan or inf"):
        pathsgd.balance(model)
    assert not torch.isfinite(pathsgd.path_norm(model))
    assert not torch.isfinite(pathsgd.path_norm(model, log=True))
    assert not torch.isfinite(pathsgd.group_norm(model))


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        ((3, 4), {}, "must hold a tensor, got int: pass torch.empty"),
        ([[1.0, 2.0]], {}, "must hold a tensor, got float"),
        (torch.ones(3, 3).numpy(), {}, "must hold a tensor, got ndarray.*torch.from_numpy"),
        (torch.ones(2, 3), {"batch_dim": 7}, "no input has an axis batch_dim=7"),
        (torch.ones(2, 3), {"batch_dim": -1}, "no input has an axis batch_dim=-1"),
        ({"x": {"y": torch.ones(2, 3)}}, {}, "for a model that takes one dict, pass"),
    ],
)
def test_examples_that_are_no_examples(example, options, message):
    with pytest.raises(pathsgd.TraceError, match=message):
        pathsgd.trace(mlp(), example, **options)


def test_errors_are_short(capfd):
    """torch.export logs and chains hundreds of lines; the message says what matters."""
    with pytest.raises(pathsgd.TraceError) as caught:
        pathsgd.trace(mlp(), torch.randn(3, 5))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert not capfd.readouterr().err


def test_models_that_cannot_be_measured():
    with pytest.raises(pathsgd.PathError, match="on the meta device"):
        pathsgd.path_norm(mlp().to("meta"), torch.randn(1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit itself is deprecated
        scripted = torch.jit.script(mlp())
    with pytest.raises(pathsgd.TraceError, match="ScriptModule cannot be traced"):
        pathsgd.trace(scripted, torch.randn(1, 3))
    head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    headed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), *head)
    with pytest.raises(pathsgd.PathError, match="is on no path, so a norm of paths says nothing"):
        pathsgd.path_norm(headed, torch.randn(1, 3))
    pathsgd.path_norm(headed, torch.randn(1, 3), region=0)
    with pytest.raises(pathsgd.PathError, match="expected two models"):
        pathsgd.rescaling_equivalent(mlp(), pathsgd.trace(mlp()))


@pytest.mark.parametrize(
    ("factors", "message"),
    [([("0", 1)], "expected"), ({0: 2.0}, "a string"), ({("0", True): 2.0}, "there is no unit True")],
)
def test_factors_of_the_wrong_kind(factors, message):
    with pytest.raises(pathsgd.RescaleError, match=message):
        pathsgd.rescale(mlp(), None, factors)


@pytest.mark.parametrize("p", ["2", None, 1000.0])
def test_p_of_the_wrong_kind(p):
    with pytest.raises(pathsgd.PathError, match="Invalid p"):
        pathsgd.path_norm(mlp(), p=p)
