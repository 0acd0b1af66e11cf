"""What is found once for a graph, against what it stands for: weights laid one after the other, and the order
in which values are computed and dropped."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd.geometry.edge_weights import EdgeWeights, signed_weights
from pathsgd.geometry.extended_float import Arithmetic
from support.networks import NETWORKS, SmallResNet, Vgg, build, traced


def make_weights(network, p, dtype=torch.float32):
    model, _ = build(network, dtype)
    graph = traced(network, dtype).folded.graph
    tensors = {name: tensor.detach() for name, tensor in graph.tensors(model).items()}
    return graph, tensors, EdgeWeights(graph, tensors, Arithmetic(p, dtype))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("network", NETWORKS)
def test_powers_are_those_of_each_weight(network, p):
    graph, tensors, edges = make_weights(network, p)
    for k, weight in graph.weights():
        arithmetic, powers = edges.for_operation(k)
        assert powers.shape == weight.shape
        assert torch.equal(arithmetic.power(powers), edges.arithmetic.power(edges.signed(k)))
        found = edges.factor_power(k) if weight.parameter is not None else None
        if found is not None:
            factors = signed_weights(replace(weight, parameter=None), tensors, torch.float32)
            assert torch.equal(found.mantissa, edges.arithmetic.power(factors).expand(weight.shape))


@pytest.mark.parametrize("network", [SmallResNet, Vgg])
def test_shifts_of_norms_are_sums(network):
    """Of a ResNet biases are those of norms alone; of a VGG, of convolutions, too."""
    graph, _, edges = make_weights(network, 2.0)
    norms = graph.channel_norms
    by_place = set(zip(*(norm.shifts for norm in norms.values()), strict=True))
    assert (by_place <= set(graph.weight_plan.vectors)) == (network is SmallResNet)
    for k, norm in norms.items():
        scale, shift = edges.of_norm(norms, k)
        powers = [edges.signed(j) ** 2 for j in norm.shifts]
        assert torch.equal(scale, edges.signed(norm.scale) ** 2)
        assert torch.equal(shift, functools.reduce(torch.add, powers))


def test_norms_with_other_epsilons_are_no_vectors_alike():
    norms = [nn.BatchNorm2d(2, eps=eps) for eps in (1e-5, 1e-5, 0.5, 0.5)]
    model = nn.Sequential(*(layer for norm in norms for layer in (norm, nn.ReLU()))).eval()
    graph = pathsgd.trace(model, torch.ones(1, 2, 3, 3)).folded.graph
    edges = EdgeWeights(graph, graph.tensors(model), Arithmetic(2.0, torch.float32))
    for k, norm in zip(graph.channel_norms.values(), norms, strict=True):
        expected = ((1 / torch.sqrt(norm.running_var + norm.eps)) ** 2).reshape(2, 1, 1)
        assert torch.equal(edges.for_operation(k.scale)[1], expected)


class Scales(nn.Module):
    """Scales of several dtypes and shapes, one of them not in order in memory, and one used twice."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(
            [torch.rand(4, dtype=torch.bfloat16), torch.rand(1, 4, 1), torch.rand(8)[::2], torch.rand(4, 1)]
        )

    def forward(self, x):
        for scale in self.scales:
            x = torch.relu(x) * scale.reshape(4, 1)
        return x * self.scales[2].reshape(4, 1)


def test_tensors_of_several_kinds_are_laid_one_after_the_other():
    model = Scales()
    graph = pathsgd.trace(model, torch.rand(1, 4, 3)).folded.graph
    assert [len(nodes) for nodes in graph.weight_plan.vectors] == [5]
    tensors = graph.tensors(model)
    edges = EdgeWeights(graph, tensors, Arithmetic(2.0, torch.float64))
    names = [f"scales.{k}" for k in (0, 1, 2, 3, 2)]
    for (k, _), name in zip(graph.weights(), names, strict=True):
        assert torch.equal(edges.for_operation(k)[1].flatten(), tensors[name].double().flatten() ** 2)
    model = model.float()
    norm = pathsgd.path_norm(model, graph)
    slopes = torch.autograd.grad(norm, list(model.parameters()))
    logs = [slope * scale / norm for slope, scale in zip(slopes, model.parameters(), strict=True)]
    times = torch.tensor([1.0, 1.0, 2.0, 1.0])  # the norm is of that degree in each scale
    torch.testing.assert_close(torch.stack([log.sum() for log in logs]), times)


@pytest.mark.parametrize("join_norms", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_values_are_there_when_read_and_dropped_then(network, join_norms):
    graph = traced(network).folded.graph
    for wanted in (frozenset(graph.ends), frozenset([len(graph.nodes) // 2])):
        steps = graph.steps(wanted, join_norms)
        there, read = set(), set()
        for k, node, sources, used_up in steps:
            assert node is graph.nodes[k]
            assert there.issuperset(sources)
            there.add(k)
            read.update(sources)
            there.difference_update(used_up)
        assert there == {step.k for step in steps} - read
        assert wanted <= {step.k for step in steps}
