"""imbalance: what balance would do, measured without doing it."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import pathsgd
from support.networks import NETWORKS, Mlp, build


@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize("network", NETWORKS)
def test_its_factors_balance_the_network(network, p):
    model, x = build(network)
    graph = pathsgd.trace(model, x)
    pathsgd.unbalance(model, graph)
    found = pathsgd.imbalance(model, graph, p)
    assert found.mu == pytest.approx(pathsgd.group_norm(model, graph, p).item())
    balanced = copy.deepcopy(model)
    assert found.mu_balanced == pytest.approx(pathsgd.balance(balanced, graph, p))
    pathsgd.rescale(model, graph, found.factors)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, balanced.get_parameter(name), rtol=1e-9)


def test_imbalance_is_the_logarithm_of_the_factor_that_unbalanced_a_unit():
    model, x = build(Mlp)
    pathsgd.balance(model, x)
    assert pathsgd.imbalance(model, x).ratio == pytest.approx(1)
    pathsgd.rescale(model, x, {("0", 3): 32.0})
    first, *others = pathsgd.imbalance(model, x).layers
    assert (first.owners, first.imbalance.largest) == (("0",), pytest.approx(5))
    assert first.imbalance.median == pytest.approx(0, abs=1e-9)
    assert all(layer.imbalance is None or abs(layer.imbalance.largest) < 1e-9 for layer in others)
