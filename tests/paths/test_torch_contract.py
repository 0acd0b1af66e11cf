"""The path optimizers keep torch's own contract: what its optimizer tests ask of any optimizer."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from pathsgd import BalancedMuon, PathNormalized, PathSGD
from support.networks import Mlp, build, traced
from support.old_torch import MOST_GRAPHS
from support.training import backward, model_of, train, unchanged, weights

MAKERS = {
    "PathSGD": lambda m, x, **kw: PathSGD(m, x, lr=kw.pop("lr", 1e-3), momentum=0.9, **kw),
    "Adam": lambda m, x, **kw: PathNormalized(torch.optim.Adam, m, x, lr=kw.pop("lr", 1e-3), **kw),
    "BalancedMuon": lambda m, x, **kw: BalancedMuon(m, x, lr=kw.pop("lr", 1e-3), **kw),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every
def test_closures_and_hooks(make):
    model, x = build(Mlp)
    optimizer = make(model, x)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() > model(x).pow(2).mean().item()
    assert called == ["before", "after"]


@every
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_loaded_state_continues_as_if_nothing_happened(make, weights_only):
    model, x = build(Mlp)
    optimizer = make(model, traced(Mlp))
    train(model, optimizer, x, steps=3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    other = build(Mlp)[0]
    other.load_state_dict(loaded["model"])
    resumed = make(other, traced(Mlp), lr=0.5)
    resumed.load_state_dict(loaded["optimizer"])
    assert resumed.param_groups[0]["lr"] == 1e-3
    assert torch.equal(train(model, optimizer, x, steps=3), train(other, resumed, x, steps=3))


@every
def test_copies_and_pickles(make):
    model, x = build(Mlp)
    optimizer = make(model, traced(Mlp))
    train(model, optimizer, x, steps=2)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = train(model, optimizer, x, steps=2)
    for other in copies:
        assert other.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
        assert torch.equal(train(model_of(other), other, x, steps=2), expected)


@every
def test_schedulers_and_groups(make):
    model, x = build(Mlp)
    optimizer = make(model, traced(Mlp), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    backward(model, x)
    extra.grad = torch.ones_like(extra)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert torch.allclose(extra, torch.zeros(2, dtype=torch.float64))


@every
def test_gradients_are_left_alone_and_missing_ones_are_skipped(make):
    model, x = build(Mlp)
    optimizer = make(model, traced(Mlp))
    before = weights(model)
    optimizer.zero_grad()
    optimizer.step()
    assert unchanged(model, before)
    backward(model, x)
    model[0].bias.grad = None
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    objects = [p.grad for p in model.parameters()]
    optimizer.step()
    for p, grad, same in zip(model.parameters(), grads, objects, strict=True):
        assert p.grad is same
        assert grad is None or torch.equal(p.grad, grad)
    assert torch.equal(model[0].bias, before[1])


@every
def test_zero_gradients_move_nothing(make):
    model, _ = build(Mlp)
    optimizer = make(model, traced(Mlp))
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert unchanged(model, before)


@every
def test_a_tensor_lr(make):
    model, x = build(Mlp)
    other = copy.deepcopy(model)
    lr = torch.tensor(1e-3, dtype=torch.float64)
    options = {"foreach": False} if make is MAKERS["Adam"] else {}
    train(model, make(model, traced(Mlp), lr=lr, weight_decay=0.1, **options), x, steps=3)
    train(other, make(other, traced(Mlp), lr=1e-3, weight_decay=0.1), x, steps=3)
    assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("make", [MAKERS["PathSGD"], MAKERS["Adam"]], ids=["PathSGD", "Adam"])
def test_maximize(make):
    model, x = build(Mlp)
    before = model(x).pow(2).mean().item()
    backward(model, x)
    make(model, traced(Mlp), maximize=True).step()
    assert model(x).pow(2).mean().item() > before


def test_low_precision_parameters():
    model, x = build(Mlp, torch.bfloat16)
    for make in MAKERS.values():
        optimizer = make(model, traced(Mlp, torch.bfloat16), lr=1e-2)
        before = weights(model)
        train(model, optimizer, x, steps=3)
        assert all(p.dtype == torch.bfloat16 and torch.isfinite(p).all() for p in model.parameters())
        assert not unchanged(model, before)
        optimizer = make(model, traced(Mlp, torch.bfloat16))
        before = weights(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        assert unchanged(model, before)


@every
def test_grad_scaler_skips_steps_with_inf(make):
    model, x = build(Mlp, torch.float32)
    optimizer = make(model, traced(Mlp, torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = weights(model)
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(x).pow(2).mean()).backward()
        if bad:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert unchanged(model, before) == bad


@pytest.mark.parametrize("fused", [False, None])
def test_a_compiled_step_is_one_graph_under_a_schedule(fused):
    model, x = build(Mlp, torch.float32)
    other = copy.deepcopy(model)
    optimizers = [PathSGD(m, x[:1], lr=torch.tensor(1e-3), momentum=0.9, fused=fused) for m in (model, other)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    for m, optimizer in zip((model, other), optimizers, strict=True):
        backward(m, x)
        optimizer.step()
    counter = CompileCounter()
    steps = [torch.compile(optimizers[0].step, backend=counter), optimizers[1].step]
    for _ in range(4):
        for m, step, scheduler in zip((model, other), steps, schedulers, strict=True):
            scheduler.step()
            m.zero_grad(set_to_none=False)
            m(x).pow(2).mean().backward()
            step()
    assert 0 < counter.frame_count <= MOST_GRAPHS
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) if fused is False else torch.allclose(a, b, rtol=1e-5)


def test_compiling_a_relative_step_leaves_it_as_it_is():
    """It runs kernels of its own on a GPU, and is no slower for being called by compiled code."""
    model, x = build(Mlp, torch.float32)
    other = copy.deepcopy(model)
    counter = CompileCounter()
    optimizers = BalancedMuon(model, x[:1]), BalancedMuon(other, x[:1])
    steps = torch.compile(optimizers[0].step, backend=counter), optimizers[1].step
    for m, step in zip((model, other), steps, strict=True):
        for _ in range(3):
            backward(m, x)
            step()
    assert counter.op_count == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@every
def test_sparse_gradients_are_refused(make):
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    tokens = torch.tensor([[0, 1, 2]])
    optimizer = make(model, tokens)
    model(tokens).sum().backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert unchanged(model, before)
    assert model[0].weight.grad.is_sparse
