"""PathSGD and PathNormalized as torch optimizers: the paper's update, and torch's own contract."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import PathNormalized, PathSGD, clip_path_grad_norm_
from support.cases import Mlp as OracleMlp
from support.cases import build as build_case
from support.networks import Mlp, SmallResNet, build, traced
from support.training import OPTIMIZERS, backward, pair, train, unchanged, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*share a path with the matrix:UserWarning")
"""Paths of a step end at batch norms, so of a ResNet's few are left, and a warning says so."""

# The update


def test_the_step_is_algorithm_1():
    """Step by step with the Dag: w - lr g / gamma, gamma by enumeration."""
    model = build_case(OracleMlp)
    x = model.example()
    optimizer = PathSGD(model, x, lr=0.05)
    for _ in range(10):
        backward(model, x)
        net, dag = model.oracle()
        gammas = net.parameter_gamma(dag, 2)
        expected = {}
        for name, w in model.named_parameters():
            alive = gammas[name] > 0
            step = np.divide(w.grad.numpy(), gammas[name], out=np.zeros(w.shape), where=alive)
            expected[name] = w.detach().numpy() - 0.05 * step
        optimizer.step()
        for name, w in model.named_parameters():
            np.testing.assert_allclose(w.detach().numpy(), expected[name], rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_path_normalized_sgd_is_path_sgd(options):
    model, x = build(SmallResNet)
    other = copy.deepcopy(model)
    train(model, PathSGD(model, traced(SmallResNet), lr=1e-3, **options), x, steps=10)
    train(other, PathNormalized(torch.optim.SGD, other, traced(SmallResNet), lr=1e-3, **options), x, steps=10)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-14)


def test_decoupled_decay_is_path_regularisation():
    """At p = 2: grad(phi^2) / (2 gamma) = w, so decay by lr * wd is a step on wd/2 * phi^2."""
    model, _ = build(Mlp)
    optimizer = PathSGD(model, traced(Mlp), lr=0.1, weight_decay=0.3)
    expected = [0.97 * w for w in weights(model)]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    other = copy.deepcopy(model)
    optimizer.step()
    assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), expected, strict=True))
    regularised = PathSGD(other, traced(Mlp), lr=0.1)
    (0.15 * pathsgd.path_norm(other, traced(Mlp)) ** 2).backward()
    regularised.step()
    assert all(torch.allclose(a, b) for a, b in zip(other.parameters(), expected, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dead_units_cause_no_nan(name):
    model, x = build(Mlp)
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = 0, 0
        model[2].weight[:, 1] = 0
    train(model, OPTIMIZERS[name](model, traced(Mlp)), x, steps=5)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_lbfgs_through_its_closure():
    model, copied, graph, x = pair(Mlp, torch.float64, powers_of_two=False)
    start = model(x).detach()
    ends = []
    for m in (model, copied):
        optimizer = PathNormalized(
            torch.optim.LBFGS, m, graph, lr=0.1, max_iter=5, line_search_fn="strong_wolfe"
        )

        def closure(m=m, optimizer=optimizer):
            optimizer.zero_grad()
            loss = m(x).pow(2).mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(5)]
        assert losses[-1] < losses[0]
        ends.append(m(x).detach())
    assert (ends[0] - ends[1]).norm() <= 1e-9 * (ends[0] - start).norm()


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.ASGD, {}),
    ],
)
def test_every_torch_optimizer_becomes_equivariant(optimizer_class, options):
    model, copied, graph, x = pair(Mlp, torch.float64, powers_of_two=False)
    start = model(x).detach()
    lr = 1e-3 if optimizer_class is not torch.optim.Adadelta else 1.0
    ends = [
        train(m, PathNormalized(optimizer_class, m, graph, lr=lr, **options), x, 10) for m in (model, copied)
    ]
    movement = (ends[0] - start).norm()
    assert movement > 0
    assert (ends[0] - ends[1]).norm() <= 1e-9 * movement


def test_clipping_is_invariant_and_raw_clipping_is_not():
    model, copied, graph, x = pair(Mlp, torch.float32, powers_of_two=True)
    optimizers = [PathSGD(m, graph, lr=0.01) for m in (model, copied)]
    norms = []
    for m, optimizer in zip((model, copied), optimizers, strict=True):
        backward(m, x)
        norms.append(clip_path_grad_norm_(optimizer, 1e-3))
        assert clip_path_grad_norm_(optimizer, 1e-3) <= 1.001e-3
        optimizer.step()
    assert torch.equal(*norms)
    assert torch.equal(model(x), copied(x))
    raw = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, copied)]
    assert not torch.allclose(*raw)


# What PathSGD takes


def test_an_example_may_be_left_out():
    model, x = build(SmallResNet)
    other = copy.deepcopy(model)
    train(model, PathSGD(model, lr=1e-3), x, steps=3)
    train(other, PathSGD(other, x[:1], lr=1e-3), x, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not model._forward_pre_hooks
    untouched = PathSGD(build(SmallResNet)[0], lr=1e-3)
    for parameter in untouched.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(pathsgd.PathError, match="has seen no batch yet"):
        untouched.step()


def test_parameters_with_a_graph():
    model, x = build(Mlp)
    graph = pathsgd.trace(model, x[:1])
    forms = [
        model.parameters(),
        list(model.named_parameters()),
        [
            {"params": [model[0].weight], "lr": 0.1},
            {"params": [p for n, p in model.named_parameters() if n != "0.weight"]},
        ],
    ]
    found = []
    for form in forms:
        optimizer = PathSGD(form, graph=graph, lr=0.1)
        before = weights(model)
        backward(model, x)
        optimizer.step()
        found.append(weights(model))
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
    for other in found[1:]:
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found[0], other, strict=True))


def test_bare_parameters_are_refused():
    model, x = build(Mlp)
    with pytest.raises(TypeError, match=r"parameters alone do not say .*pass the model itself"):
        PathSGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="pass the model itself"):
        PathSGD(model.parameters(), x, lr=0.1)
    graph = pickle.loads(pickle.dumps(pathsgd.trace(model, x)))
    with pytest.raises(TypeError, match="pass the model itself"):
        PathSGD(model.parameters(), graph=graph)


class Lion(torch.optim.Optimizer):
    """An optimizer torch does not have: the sign of an interpolated momentum, with decoupled decay."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(group["lr"] * m.lerp(p.grad, 1 - group["betas"][0]).sign())
                    m.lerp_(p.grad, 1 - group["betas"][1])


def test_an_optimizer_of_someone_else():
    model, copied, graph, x = pair(Mlp, torch.float32, powers_of_two=True)
    ends = [
        train(m, PathNormalized(Lion, m, graph, lr=1e-3, weight_decay=0.1), x, 20) for m in (model, copied)
    ]
    assert torch.equal(*ends)
    raw = [train(m, Lion(m.parameters(), lr=1e-3), x, 5) for m in (model, copied)]
    assert not torch.allclose(*raw, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"momentum": -0.5}, "Invalid momentum value: -0.5"),
        ({"weight_decay": -0.5}, "Invalid weight_decay value: -0.5"),
        ({"nesterov": True}, "Nesterov momentum requires a momentum"),
        ({"p": 0.5}, "Invalid p: 0.5"),
        ({"lr": torch.tensor([1.0, 2.0])}, "Tensor lr must be 1-element"),
    ],
)
def test_invalid_options(options, message):
    model, _ = build(Mlp)
    with pytest.raises(ValueError, match=message):
        PathSGD(model, traced(Mlp), **{"lr": 0.1, **options})


def test_a_model_that_changed():
    model, x = build(Mlp)
    optimizer = PathSGD(model, traced(Mlp))
    backward(model, x)
    before = weights(model)
    old = model[2].weight
    model[2].weight = nn.Parameter(old.detach().clone())
    with pytest.raises(pathsgd.PathError, match=r"'2.weight' is not the one the optimizer was made with"):
        optimizer.step()
    assert unchanged(model, before)


def test_a_model_that_grew_or_changed_its_shape():
    def grow(model):
        model.extra = nn.Parameter(torch.ones(2))

    def reshape(model):
        model[2].weight = model[2].weight  # the same Parameter
        model[2].weight.data = torch.randn(7, 9, dtype=torch.float64)
        model[2].weight.grad = torch.zeros(7, 9, dtype=torch.float64)

    for change, message in (
        (grow, "a parameter 'extra' that it did not have"),
        (reshape, r"'2.weight' has shape \(7, 9\)"),
    ):
        for make in (PathSGD, lambda *a: PathNormalized(torch.optim.Adam, *a)):
            model, x = build(Mlp)
            optimizer = make(model, traced(Mlp))
            backward(model, x)
            change(model)
            before = weights(model)
            with pytest.raises(pathsgd.PathError, match=message):
                optimizer.step()
            assert unchanged(model, before)


def test_gradients_of_the_wrong_layout():
    model, x = build(Mlp)
    optimizer = PathSGD(model, traced(Mlp))
    backward(model, x)
    before = weights(model)
    model[2].weight.grad = model[2].weight.grad.to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert unchanged(model, before)
    with pytest.raises(ValueError, match="more than one parameter group"):
        PathSGD(
            [{"params": list(model.parameters())}, {"params": [model[0].weight]}],
            graph=pathsgd.trace(model, x[:1]),
        )
