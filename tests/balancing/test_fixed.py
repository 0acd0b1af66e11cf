"""balance(..., fixed=names): parameters that stay as they are, as the base of adapters does."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import pathsgd
from pathsgd import PathError
from support import cases, networks, starts
from support.starts import stack


def norm_of(model, names, p):
    return sum(float(model.get_parameter(name).detach().abs().pow(p).sum()) for name in names) ** (1 / p)


@pytest.mark.parametrize("network", [networks.Mlp, cases.ConvPool, cases.Residual, networks.Products])
@pytest.mark.parametrize("seed", range(3))
def test_fixed_parameters_stay_and_the_rest_is_balanced(network, seed):
    torch.manual_seed(seed)
    if network is networks.Products:
        model, x = networks.Products(attends=True).double(), torch.randn(2, 4, 3, dtype=torch.float64)
        graph = pathsgd.trace(model, x)
    else:
        (model, x), graph = starts.build(network), starts.traced(network)
    names = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    fixed = names[-seed]
    rescaled = copy.deepcopy(model)
    pathsgd.unbalance(rescaled, graph, units=100)
    rescaled.get_parameter(fixed).data.copy_(model.get_parameter(fixed).data)  # another function, maybe
    for start in (model, rescaled):
        found = copy.deepcopy(start)
        pathsgd.balance(found, graph, fixed=[fixed])
        assert torch.equal(found.get_parameter(fixed), start.get_parameter(fixed))
        torch.testing.assert_close(found(x), start(x), rtol=1e-9, atol=1e-9 * start(x).abs().max().item())
        again = copy.deepcopy(found)
        pathsgd.unbalance(again, graph, units=100)
        pathsgd.balance(again, graph)
        assert norm_of(found, graph.parameters, 2) >= norm_of(again, graph.parameters, 2) * (1 - 1e-9)
        assert norm_of(found, graph.parameters, 2) <= norm_of(start, graph.parameters, 2) * (1 + 1e-9)


@torch.no_grad()
def test_units_beside_fixed_parameters_are_balanced():
    model = stack(6, 8, 8, 2)
    graph, other = pathsgd.trace(model), copy.deepcopy(model)
    other[2].weight[3] /= 64
    other[2].bias[3] /= 64
    other[4].weight[:, 3] *= 64
    for each in (model, other):
        pathsgd.balance(each, graph, fixed=["0.weight"])
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-9, atol=0)


def test_names_of_fixed_parameters_exist():
    model = stack(6, 4, 2)
    graph = pathsgd.trace(model)
    with pytest.raises(PathError, match="no parameter 'weights'"):
        pathsgd.balance(model, graph, fixed=["0.weight", "weights"])
    with pytest.raises(PathError, match="fixed needs a finite q"):
        pathsgd.balance(model, graph, q=math.inf, fixed=["0.weight"])
