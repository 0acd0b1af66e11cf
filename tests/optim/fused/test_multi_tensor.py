"""Plain steps of any network by one kernel over all tensors, against the reference; here interpreted."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import PathNormalized, PathSGD
from pathsgd.graph.path_graph import remember_model
from pathsgd.optim.fused.gpu import multi_tensor
from support.networks import DenseNet, Mlp, Recurrent, SmallResNet, Transformer, Vgg, build
from support.training import pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NETWORKS = [Vgg, SmallResNet, DenseNet, Recurrent, Transformer]


def normalized(kind, **options):
    return lambda m, g, **more: PathNormalized(kind, m, g, **options, **more)


def sgd(**options):
    return lambda m, g, **more: PathSGD(m, g, **options, **more)


OPTIMIZERS = {
    "PathSGD": sgd(lr=1e-4),
    "momentum": sgd(lr=1e-5, momentum=0.9, weight_decay=0.1),
    "nesterov": sgd(lr=1e-5, momentum=0.9, nesterov=True, maximize=True),
    "p=1": sgd(lr=1e-6, p=1),
    "fallback": sgd(lr=1e-4, fallback_lr=1e-2, weight_decay=0.1),
    "SGD": normalized(torch.optim.SGD, lr=1e-4, weight_decay=0.1),
    "coupled": normalized(torch.optim.SGD, lr=1e-4, momentum=0.9, weight_decay=0.1),
    "Adagrad": normalized(torch.optim.Adagrad, lr=1e-3, lr_decay=0.1),
    "Adam": normalized(torch.optim.Adam, lr=1e-4, weight_decay=0.1),
    "AdamW": normalized(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
}


@functools.cache
def traced(network):
    return pathsgd.trace(*build(network, torch.float32))


def graph_of(network, model):
    graph = copy.copy(traced(network))
    remember_model(graph, model)
    return graph


def train(model, x, optimizer, steps=3, before_step=None):
    torch.manual_seed(0)  # of dropout
    for k in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(1), torch.arange(len(x), device=x.device) % 2).backward()
        if before_step is not None:
            before_step(model, optimizer, k)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def both_ways(network, make, to=lambda model: model, steps=3, before_step=None):
    """(weights, optimizer) by the kernel and by the reference."""
    model, x = build(network, torch.float32)
    model = to(model)
    found = []
    for implementation in ("triton", "reference"):
        own = copy.deepcopy(model).to(DEVICE)
        optimizer = make(own, graph_of(network, own), implementation=implementation)
        found.append((train(own, x.to(DEVICE), optimizer, steps, before_step), optimizer))
        assert set(optimizer.implementations.values()) == {implementation}
    return found


def assert_same(found, expected):
    """Weights and state, to 1e-6 of the largest."""
    assert (found[0] - expected[0]).abs().max() <= 1e-6 * expected[0].abs().max()
    for ours, theirs in zip(*(own[1].state_dict()["state"].values() for own in (found, expected)), strict=True):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            assert (ours[name].shape, ours[name].dtype) == (value.shape, value.dtype)
            torch.testing.assert_close(ours[name].to(value.device), value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_kernel_takes_the_same_steps(network, name):
    assert_same(*both_ways(network, OPTIMIZERS[name]))
