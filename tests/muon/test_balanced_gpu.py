"""BalancedMuon on a GPU: by kernels, captured by the optimizer, from rescaled starts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import pathsgd
from pathsgd import BalancedMuon
from support.networks import Mlp, SmallResNet, Transformer, Vgg, build

pytestmark = pytest.mark.gpu
NETWORKS = [Mlp, Vgg, SmallResNet, Transformer]


def make(network):
    model, x = build(network, torch.float32)
    return model.cuda(), x.cuda()


def take_steps(model, optimizer, x, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(1), torch.arange(len(x), device="cuda") % 2).backward()
        optimizer.step()


@pytest.mark.parametrize("network", NETWORKS)
def test_kernels_move_all(network):
    model, x = make(network)
    optimizer = BalancedMuon(model, x)
    take_steps(model, optimizer, x, 2)
    assert optimizer._step.kernels.is_supported
    before = [p.detach().clone() for p in model.parameters()]
    take_steps(model, optimizer, x, 1)
    assert optimizer._step.kernels.run()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("network", [Mlp, Vgg])  # whose gradients are the same every time
def test_rescaled_by_powers_of_two_gives_the_same_bits(network):
    """At the start, and in mid-training."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, x = make(network)
    graph = pathsgd.trace(model, x)
    other = copy.deepcopy(model)
    pathsgd.unbalance(other, graph, powers_of_two=True)
    for m in (model, other):
        optimizer = BalancedMuon(m, graph)
        take_steps(m, optimizer, x, 12)
        if m is other:
            pathsgd.unbalance(m, graph, powers_of_two=True)
        take_steps(m, optimizer, x, 2)
    torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_channels_last():
    model, x = make(Vgg)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    graph = pathsgd.trace(model, x)
    for m in (model, other):
        take_steps(m, BalancedMuon(m, graph, lr=0.01), x, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-2 * p.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_take_steps_without_kernels(dtype):
    model, x = build(Mlp, torch.float32)
    model, x = model.to("cuda", dtype), x.to("cuda", dtype)
    optimizer = BalancedMuon(model, x)
    losses = [find_loss(model, x)]
    take_steps(model, optimizer, x, 12)
    losses.append(find_loss(model, x))
    assert losses[1] < losses[0]
    assert not optimizer._step.kernels.is_supported


def test_launches_are_captured_and_read_rates_and_gradients_anew():
    model, x = make(Mlp)
    other = copy.deepcopy(model)
    graph = pathsgd.trace(model, x)
    for m in (model, other):
        optimizer = BalancedMuon(m, graph, lr=0.05)
        for k in range(14):
            optimizer.param_groups[0]["lr"] = 0.05 / (k + 1)
            if k == 9:
                optimizer.param_groups[0]["weight_decay"] = 0.1
            take_steps(m, optimizer, x, 1)
            if m is other:
                optimizer._step.kernels.is_small = False
        assert (optimizer._step.kernels.graph is None) == (m is other)
        y = m(x).sum()
        take_steps(m, optimizer, x, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()  # torch counts what kernels write
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def find_loss(model, x):
    return F.cross_entropy(model(x).flatten(1).float(), torch.arange(len(x), device="cuda") % 2).item()
