"""imbalance: what balance would do, measured without doing it."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import pathsgd
from support.networks import NETWORKS, Mlp, build, traced

ORDERS = [(1, math.inf), (2, math.inf), (math.inf, math.inf), (2, 2), (3, 1.5)]


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_its_factors_balance_the_network(network, orders):
    p, q = orders
    model, _ = build(network)
    graph = traced(network)
    pathsgd.unbalance(model, graph)
    result = pathsgd.imbalance(model, graph, p, q)
    if math.isinf(q):
        assert result.mu == pytest.approx(pathsgd.group_norm(model, graph, p).item())
    balanced = copy.deepcopy(model)
    assert result.mu_balanced == pytest.approx(pathsgd.balance(balanced, graph, p, q), rel=1e-12)
    pathsgd.rescale(model, graph, result.factors)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, balanced.get_parameter(name), rtol=1e-9)
    again = pathsgd.imbalance(balanced, graph, p, q)
    assert again.ratio == pytest.approx(1, rel=1e-12)
    assert again.mu_balanced == pytest.approx(result.mu_balanced, rel=1e-12)


@pytest.mark.parametrize("q", [2, math.inf])
def test_imbalance_is_the_logarithm_of_the_factor_that_unbalanced_a_unit(q):
    model, x = build(Mlp)
    pathsgd.balance(model, x, q=q)
    assert pathsgd.imbalance(model, x, q=q).ratio == pytest.approx(1)
    pathsgd.rescale(model, x, {("0", 3): 32.0})
    first, *others = pathsgd.imbalance(model, x, q=q).layers
    assert (first.owners, first.imbalance.largest) == (("0",), pytest.approx(5))
    assert first.imbalance.median == pytest.approx(0, abs=1e-9)
    assert all(layer.imbalance is None or abs(layer.imbalance.largest) < 1e-9 for layer in others)


def test_mu_22_is_the_norm_of_all_weights():
    model, x = build(Mlp)
    result = pathsgd.imbalance(model, x)
    assert result.mu == pytest.approx(
        torch.cat([w.flatten() for w in model.parameters()]).norm().item(), rel=1e-12
    )
    assert result.ratio > 1
