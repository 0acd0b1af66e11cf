"""What users do with torch's optimizers: groups, moved and changed models, gradients that are nan."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import BalancedMuon, PathError, PathNormalized, PathSGD

OPTIMIZERS = {
    "BalancedMuon": BalancedMuon,
    "PathSGD": PathSGD,
    "PathNormalized": lambda model, *args, **options: PathNormalized(
        torch.optim.AdamW, model, *args, **options
    ),
}
every = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
X = torch.linspace(-1, 1, 12).reshape(4, 3)


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def step(model, optimizer):
    optimizer.zero_grad()
    model(X.to(next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()


@every
@pytest.mark.parametrize("named", [False, True])
def test_groups_with_and_without_decay(make, named):
    """As most recipes make them. Without a gradient's signal, decay is all there is."""
    model = mlp()

    def chosen(dims):
        return [pair if named else pair[1] for pair in model.named_parameters() if pair[1].dim() == dims]

    groups = [
        {"params": chosen(2), "weight_decay": 0.5},
        {"params": chosen(1), "weight_decay": 0.0},
    ]
    optimizer = make(groups, graph=pathsgd.trace(model, X), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.norm() < 0.99 * old.norm() if p.dim() == 2 else torch.allclose(p, old, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_need_the_graph_of_their_model(name):
    model, make = mlp(), OPTIMIZERS[name]
    graph = pathsgd.trace(model, X)
    call = rf"{name}\((torch\.optim\.AdamW, )?model, example_input\).*graph=pathsgd\.trace"
    for params in (model.parameters(), model.named_parameters(), [{"params": model.parameters()}]):
        with pytest.raises(TypeError, match=rf"parameters alone do not say .*{call}"):
            make(params)
    with pytest.raises(TypeError, match=rf"is gone, or the graph is a copy.*{call}"):
        make(model.parameters(), graph=pickle.loads(pickle.dumps(graph)))
    for params in (model, model.parameters()):
        with pytest.raises(TypeError, match=rf"graph= takes what pathsgd\.trace.*got Tensor.*{name}\("):
            make(params, graph=X)


@pytest.mark.parametrize(
    ("name", "found"), [*zip(OPTIMIZERS, ("BalancedMuon", "PathSGD", "AdamW"), strict=True)]
)
def test_unknown_options_name_the_class_that_has_none_such(name, found):
    with pytest.raises(TypeError, match=rf"^{found}\.__init__\(\) got an unexpected keyword argument 'beta'"):
        OPTIMIZERS[name](mlp(), X, beta=0.9)


@every
def test_a_module_without_parameters_is_replaced(make):
    """Paths are those of the activation that was traced: silently so before, but for BalancedMuon."""
    model = mlp()
    optimizer = make(model, X)
    step(model, optimizer)
    model[1] = nn.Tanh()
    with pytest.raises(PathError, match="make the optimizer again"):
        step(model, optimizer)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_optimizer_made_before_the_model_changes_its_precision(make, dtype):
    model = mlp()
    optimizer = make(model, X)
    model.to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer)
    step(model, optimizer)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not any(map(torch.equal, model.parameters(), before))


@every
def test_nan_gradients_do_what_they_do_in_torch(make):
    """A GradScaler skips the step; without one they enter the parameter that has them, and no other."""
    model = mlp()
    optimizer, scaler = make(model, X), torch.amp.GradScaler("cpu")
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(X).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.zero_grad()
    model(X).square().sum().backward()
    model[2].weight.grad[0, 0] = float("nan")
    optimizer.step()
    found = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    assert found == ["2.weight"]


def test_float16():
    """Squares of gradients vanish in it, so that BalancedMuon's first step was nan."""
    model = mlp().half()
    with pytest.raises(PathError, match=r"'0\.weight' is float16.*use bfloat16 parameters"):
        step(model, BalancedMuon(model, X))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    step(model, PathNormalized(torch.optim.SGD, model, X, lr=0.0))  # no error about its range
