"""Corners of the optimizers that users reach: copies, resumed runs, groups, errors in mid-step."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import pathsgd
from pathsgd import BalancedMuon, PathNormalized, PathSGD, clip_path_grad_norm_
from pathsgd.paths import model_gammas
from support.networks import Mlp, Vgg, build
from support.training import backward, train, unchanged, weights


class Lazy(nn.Module):
    """Not a Sequential, so its paths are known after the first batch only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(self.a(x).relu())


MAKERS = {
    "PathSGD": PathSGD,
    "PathNormalized": lambda m, **o: PathNormalized(torch.optim.SGD, m, lr=0.1, **o),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every
def test_a_lazy_optimizer_leaves_the_model_free_to_be_copied(make):
    model = Lazy()
    optimizer = make(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model), AveragedModel(model).module, pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False), *(copy.deepcopy((model, optimizer))[:1]),
    ]  # fmt: skip
    x = torch.randn(5, 3)
    for other in copies:
        other(x)
    with pytest.raises(pathsgd.PathError, match="seen no batch yet"):
        _ = optimizer.graph
    both = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), both):
        m(x).sum().backward()
        before = weights(m)
        o.step()
        assert not unchanged(m, before)
        assert all(info.normalised for info in o.graph.parameters.values())


@every
def test_a_first_batch_that_fails_is_not_remembered(make):
    model = Lazy()
    optimizer = make(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(5, 7))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()


def test_a_lazy_optimizer_of_a_compiled_model():
    model = Lazy()
    compiled = torch.compile(model, backend="eager")
    optimizer = PathSGD(compiled)
    compiled(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    assert all(info.normalised for info in optimizer.graph.parameters.values())


@every
def test_parameters_of_another_model_are_refused(make):
    model, x = build(Mlp)
    graph = pathsgd.trace(model, x[:1])
    for params in (list(copy.deepcopy(model).parameters()), [{"params": copy.deepcopy(model).parameters()}]):
        with pytest.raises(TypeError, match="none of these parameters belongs to the model"):
            make(params, graph=graph)


@pytest.mark.parametrize("make", [*MAKERS.values(), BalancedMuon])
def test_parameters_that_are_replaced_everywhere_are_an_error(make):
    """As Accelerate does with FSDP2: in the model and in the optimizer's groups."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = make(model)
    for module in (model[0], model[2]):
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    for group in optimizer.param_groups:
        group["params"] = list(model.parameters())
    backward(model, torch.ones(5, 3))
    with pytest.raises(pathsgd.PathError, match="make the optimizer again"):
        optimizer.step()


def test_momentum_keeps_its_precision_when_it_is_loaded():
    model, x = build(Mlp, torch.bfloat16)
    optimizer = PathSGD(model, x[:1], lr=1e-2, momentum=0.9)
    train(model, optimizer, x, steps=5)
    other = copy.deepcopy(model)
    resumed = PathSGD(other, x[:1])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file))
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, x, steps=3)
    assert unchanged(other, weights(model))


def test_groups_are_checked():
    model, x = build(Mlp)
    graph = pathsgd.trace(model, x[:1])
    params = list(model.parameters())
    with pytest.raises(ValueError, match="Invalid p"):
        PathSGD([{"params": params, "p": 0.5}], graph=graph)
    with pytest.raises(ValueError, match="'p' cannot differ"):
        PathNormalized(torch.optim.SGD, [{"params": params, "p": 1.0}], graph=graph, lr=0.1)
    extra = nn.Parameter(torch.ones(()))
    optimizer = PathSGD(params, graph=graph, lr=1e-3)
    optimizer.add_param_group({"params": [extra], "lr": 0.1})
    extra.grad = torch.ones(())
    optimizer.step()
    assert extra.item() == pytest.approx(0.9)


def test_a_closure_that_raises_leaves_the_weights():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    optimizer = PathNormalized(torch.optim.LBFGS, model, x[:1], lr=0.1)
    before = weights(model)
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert unchanged(model, before)


def test_z_beyond_half_precision_is_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).half()
    with torch.no_grad():
        model[0].weight.fill_(10.0), model[2].weight.fill_(30000.0)
    optimizer = PathNormalized(torch.optim.SGD, model, lr=1e-6, p=1)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(pathsgd.PathError, match="beyond the range of float16"):
        optimizer.step()
    assert unchanged(model, before)


def test_load_hooks_of_path_normalized():
    model, x = build(Mlp)
    optimizer = PathNormalized(torch.optim.Adam, model, x[:1])
    called = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before", "after"]


def test_one_element_lr():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model.gain = nn.Parameter(torch.ones(()))
    optimizer = PathSGD(model, torch.zeros(1, 3), lr=torch.tensor([0.1]))
    (model(torch.randn(5, 3)).sum() * model.gain).backward()
    optimizer.step()
    assert model.gain.item() != 1


def test_sparse_gradients_cannot_be_clipped():
    model, x = build(Mlp)
    optimizer = PathSGD(model, x[:1])
    backward(model, x)
    model[2].weight.grad = model[2].weight.grad.to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        clip_path_grad_norm_(optimizer, 1.0)


def test_mistakes_are_explained():
    model, x = build(Mlp)
    with pytest.raises(TypeError, match="needs a PathSGD or PathNormalized"):
        clip_path_grad_norm_(torch.optim.SGD(model.parameters(), lr=0.1), 1.0)
    for swapped in ((torch.optim.AdamW(model.parameters()), model, x), (model, torch.optim.AdamW, x)):
        with pytest.raises(TypeError, match="pass the class of the optimizer first"):
            PathNormalized(*swapped)
    with pytest.raises(TypeError, match=r"lr by its name: lr=0.001"):
        PathSGD(model, 1e-3)


def test_what_was_measured_to_clip_serves_the_step(monkeypatch):
    """Once, unless weights are written in between."""
    model, x = build(Vgg)
    calls = []
    measure = model_gammas.measure_gammas
    monkeypatch.setattr(model_gammas, "measure_gammas", lambda *a, **k: calls.append(1) or measure(*a, **k))
    optimizer = PathSGD(model, x[:1], lr=1e-3, fused=False)
    for expected in (1, 2):
        calls.clear()
        backward(model, x)
        clip_path_grad_norm_(optimizer, 1.0)
        if expected == 2:
            with torch.no_grad():
                next(model.parameters()).mul_(2)
        optimizer.step()
        assert len(calls) == expected


def test_paths_of_a_step_end_at_batch_norms():
    """Running statistics, which a forward pass writes, do not enter; gammas() has them as they act."""
    model, x = build(Vgg)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, buffer in twin.named_buffers():
            if "running" in name:
                buffer.add_(torch.rand_like(buffer))
    for m in (model, twin):
        optimizer = PathSGD(m, x[:1], lr=1e-3)
        for parameter in m.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert unchanged(twin, weights(model))
    assert "batch norm divides by statistics of the batch" in str(optimizer.graph)
    assert "batch norm divides" not in str(pathsgd.trace(model, x[:1]))
