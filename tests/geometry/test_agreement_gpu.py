"""CPU and CUDA agree on gamma, with and without exponents, and rescaling and balancing work on a GPU."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import pathsgd
from pathsgd.geometry.gamma import measure_gammas
from support import cases
from support.networks import NETWORKS, build

pytestmark = pytest.mark.gpu


def assert_agree(model, x, bound):
    """Compares log(gamma): gamma itself may leave the range of floats."""
    on_gpu = copy.deepcopy(model).cuda()
    graph, graph_gpu = pathsgd.trace(model, x), pathsgd.trace(on_gpu, x.cuda())
    assert str(graph) == str(graph_gpu)
    for p in (1, 1.5, 2, 4, math.inf):
        for centered in (False, True):
            expected = measure_gammas(graph, graph.tensors(model), p, centered=centered)
            found = measure_gammas(graph_gpu, graph_gpu.tensors(on_gpu), p, centered=centered)
            for name, gamma in expected.items():
                a, b = found[name].log2().cpu(), gamma.log2()
                assert torch.equal(torch.isinf(a), torch.isinf(b)), f"{name}: dead on one device only"
                alive = torch.isfinite(b)
                assert ((a - b)[alive].abs() * math.log(2) <= bound).all(), f"{name}, p = {p}"


@pytest.mark.parametrize("case", cases.CASES)
def test_cases_agree(case):
    model = cases.build(case)
    assert_agree(model, model.example(), 1e-12)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 1e-4)]
)
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_agree(network, dtype, bound):
    assert_agree(*build(network, dtype), bound)


@pytest.mark.parametrize("network", NETWORKS)
def test_unbalancing_and_balancing_on_a_gpu_keep_the_function(network):
    model, x = (thing.cuda() for thing in build(network))
    graph = pathsgd.trace(model, x)
    original, before = copy.deepcopy(model), model(x).detach()
    pathsgd.unbalance(model, graph)
    assert pathsgd.rescaling_equivalent(original, model, graph)
    pathsgd.balance(model, graph)
    assert (model(x) - before).abs().max() <= 1e-10 * before.abs().max()
