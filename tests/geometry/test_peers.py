"""What other implementations get wrong, each as a test that this one passes.

The table "found" of the design notes, row by row; some rows have their main test elsewhere.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.graph.unit_classes import unit_classes_of
from support.calls import Calls
from support.networks import NETWORKS, Mlp, SmallResNet, Vgg, build, dense_gammas
from support.old_torch import needs_muon


def path_step(model, graph, x, lr=1e-3, p=2):
    """One Path-SGD step as the paper writes it: w -= lr g / gamma."""
    model.zero_grad()
    model(x).pow(2).mean().backward()
    found = measure_gammas(graph, graph.tensors(model), p)
    with torch.no_grad():
        for name, w in model.named_parameters():
            gamma = found[name].dense()
            w -= torch.where(gamma > 0, lr * w.grad / gamma, 0)


def train(model, x, optimizer, steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def defect(model, copied, x, start):
    """Difference of the two functions as a share of how far training moved them."""
    movement = (model(x) - start).norm()
    return ((model(x) - copied(x)).norm() / movement).item()


class TestNoGradientIsScaled:
    """bneyshabur/path-sgd: an exhausted generator leaves every gradient as it was; gamma accumulates."""

    def test_the_step_is_not_sgds(self):
        model, x = build(Mlp)
        graph = pathsgd.trace(model, x)
        sgd = copy.deepcopy(model)
        path_step(model, graph, x)
        train(sgd, x, torch.optim.SGD(sgd.parameters(), 1e-3), steps=1)
        for name, w in model.named_parameters():
            if name != "4.bias":  # the output's bias has gamma = 1: there Path-SGD is SGD
                assert not torch.allclose(w, sgd.get_parameter(name), rtol=1e-6)

    def test_gamma_is_recomputed_not_accumulated(self):
        model, x = build(Mlp)
        graph = pathsgd.trace(model, x)
        first = dense_gammas(model, graph)
        again = dense_gammas(model, graph)
        assert all(torch.equal(first[name], again[name]) for name in first)
        model[2].weight.data *= 2
        changed = dense_gammas(model, graph)
        assert torch.allclose(changed["0.weight"], 4 * first["0.weight"])


class TestPathNormByRewriting:
    """agonon/pathnorm-pytorch."""

    def test_relu6_is_not_accepted(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU6(), nn.Linear(4, 2))
        assert not any(info.normalised for info in pathsgd.trace(model).parameters.values())
        with pytest.raises(pathsgd.PathError, match=r"hardtanh|relu6"):
            pathsgd.path_norm(model)

    def test_a_difference_adds_paths(self):
        class Difference(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)

            def forward(self, x):
                return self.a(x) - self.b(x)

        model = Difference()
        expected = model.a.weight.abs().sum() + model.b.weight.abs().sum()
        assert torch.allclose(pathsgd.path_norm(model, torch.randn(1, 3), p=1), expected)

    def test_a_shared_parameter_is_powered_once(self):
        layer = nn.Linear(3, 3, bias=False)
        other = nn.Linear(3, 3, bias=False)
        other.weight = layer.weight
        model = nn.Sequential(layer, nn.ReLU(), other)
        squared = layer.weight.detach() ** 2
        expected = (squared @ squared).sum().sqrt()
        assert torch.allclose(pathsgd.path_norm(model, torch.randn(1, 3)), expected)

    def test_depth_300(self):
        layers = []
        for _ in range(300):
            layers += [nn.Linear(64, 64), nn.ReLU()]
        model = nn.Sequential(*layers[:-1])
        assert math.isfinite(pathsgd.path_norm(model, p=1, log=True).item())

    def test_adaptive_windows_are_the_true_ones(self):
        model = nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), nn.AdaptiveAvgPool1d(3))
        model[0].weight.data.fill_(1)
        # 7 entries into 3: windows [0:3], [2:5], [4:7], so each output is 3 paths of weight 1/3.
        found = pathsgd.path_norm(model, torch.randn(1, 1, 7), p=2, per_output=True)[0]
        assert torch.allclose(found, torch.full((1, 1, 3), math.sqrt(3) / 3))


class TestConditioning:
    """Artim436/pathcond: a Python loop per neuron, the model left in eval mode, ResNet refused."""

    def test_the_work_does_not_grow_with_the_width(self):
        counts = []
        for width in (8, 64):
            model = nn.Sequential(
                nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
            )
            graph = pathsgd.trace(model)
            tensors = graph.tensors(model)
            with Calls() as calls:
                measure_gammas(graph, tensors)
            counts.append(calls.count)
        assert counts[0] == counts[1]

    def test_flags_and_residual_networks(self):
        model, x = build(SmallResNet)
        model.train()
        dense_gammas(model, x)
        pathsgd.balance(model, x)
        assert all(module.training for module in model.modules())


def test_max_pooling_sums_its_window():
    """bneyshabur/generalization-bounds: a maximum stays a maximum, and paths are lost."""
    model = nn.Sequential(
        nn.Conv2d(1, 1, 1, bias=False), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 1, bias=False)
    )
    model[0].weight.data.fill_(1)
    model[3].weight.data.fill_(1)
    assert pathsgd.path_norm(model, torch.randn(1, 1, 4, 4), p=1).item() == 16


class TestRebalancing:
    """facebookresearch/enorm: biases change the function, dead units give NaN, the kind is told by hand."""

    @pytest.mark.parametrize("network", [Mlp, Vgg])
    def test_biases_belong_to_their_unit(self, network):
        model, x = build(network)
        before = model(x).detach()
        pathsgd.balance(model, x)
        assert torch.allclose(model(x), before, rtol=1e-10)

    def test_dead_units(self):
        model, x = build(Mlp)
        with torch.no_grad():
            model[0].weight[0], model[0].bias[0], model[2].weight[:, 1] = 0, 0, 0
        pathsgd.balance(model, x)
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("network", NETWORKS)
def test_an_optimizer_does_not_go_stale(network):
    """vitalab/neuralteleportation replaces Parameters; an optimizer made before keeps working here."""
    model, x = build(network)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    pathsgd.unbalance(model, x)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_normalised_means_on_batch_norm():
    """The mean enters as a path of its own, and no gamma is negative."""
    model = nn.Sequential(
        nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1, bias=False)
    )
    model = model.double().eval()
    norm = model[1]
    norm.running_mean.copy_(torch.tensor([5.0, -3.0, 0.0]))
    norm.running_var.copy_(torch.tensor([0.5, 2.0, 1.0]))
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    gamma = dense_gammas(model)
    variance = norm.running_var + norm.eps
    out = model[3].weight[0] ** 2
    into = (model[0].weight ** 2).sum(1)
    assert torch.allclose(gamma["1.weight"], (into + norm.running_mean**2) / variance * out)
    assert torch.allclose(gamma["1.bias"], out)


@pytest.mark.parametrize("p", [1, 1.5, 2, 4])
def test_balanced_and_unbalanced_trajectories_agree(p):
    model, x = build(Mlp)
    graph = pathsgd.trace(model, x)
    copied = copy.deepcopy(model)
    factors = 10 ** (6 * torch.rand(unit_classes_of(graph).owners["0"].numel()).double() - 3)
    pathsgd.rescale(copied, graph, {"0": factors})
    start = model(x).detach()
    for _ in range(20):
        path_step(model, graph, x, p=p)
        path_step(copied, graph, x, p=p)
    assert defect(model, copied, x, start) < 1e-9


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, 1e-3),
        lambda ps: torch.optim.SGD(ps, 1e-3, momentum=0.9),
        lambda ps: torch.optim.Adagrad(ps, 1e-2),
        lambda ps: torch.optim.Adam(ps, 1e-3),
        pytest.param(lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], 1e-3), marks=needs_muon),
    ],
    ids=["SGD", "momentum", "Adagrad", "Adam", "Muon"],
)
def test_torch_optimizers_tell_equivalent_networks_apart(make):
    """So that the test above can fail."""
    model, x = build(Mlp)
    copied = copy.deepcopy(model)
    pathsgd.rescale(copied, x, {"0": torch.tensor([0.05, 20, 1, 7, 0.1, 1, 3, 0.4]).double()})
    start = model(x).detach()
    for network in (model, copied):
        train(network, x, make(list(network.parameters())))
    assert not defect(model, copied, x, start) < 1e-2


def test_functional_relu_and_inplace_variants_are_the_module():
    class Functional(nn.Module):
        def __init__(self, activation):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
            self.activation = activation

        def forward(self, x):
            return self.b(self.activation(self.a(x)))

    found = []
    for activation in (
        nn.ReLU(),
        nn.ReLU(inplace=True),
        F.relu,
        F.relu_,
        torch.relu,
        lambda x: x.clamp_(min=0),
    ):
        torch.manual_seed(0)
        found.append(pathsgd.path_norm(Functional(activation), torch.randn(2, 3)))
    assert all(torch.equal(phi, found[0]) for phi in found)
