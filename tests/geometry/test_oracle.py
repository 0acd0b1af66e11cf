"""phi, gamma and mu against brute-force enumeration of every path, on every case and every p."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pathsgd
from pathsgd.dag import Dag
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.graph.unit_classes import unit_classes_of
from support.cases import CASES, Tied, build, traced
from support.networks import dense_gammas
from support.unroll import Unroller, parameters

EXPONENTS = (1, 1.5, 2, 3, math.inf)


@functools.cache
def oracle(case):
    """(unroller, dag): written down once for all the tests of a case, whose weights are always the same."""
    return build(case).oracle()


def assert_close(found, expected, what):
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-300, err_msg=what)


@pytest.mark.parametrize("case", CASES)
def test_gamma_and_phi(case):
    model, graph = build(case), traced(case)
    assert all(info.normalised for info in graph.parameters.values()), str(graph)
    net, dag = oracle(case)
    for p in EXPONENTS:
        found = measure_gammas(graph, graph.tensors(model), p)
        for name, expected in net.parameter_gamma(dag, p).items():
            assert_close(found[name].dense().numpy(), expected, f"gamma_{p} of {name}")
        assert_close(pathsgd.path_norm(model, graph, p).item(), dag.phi(p), f"phi_{p}")
        per_output = torch.cat([t.flatten() for t in pathsgd.path_norm(model, graph, p, per_output=True)])
        assert_close(per_output.detach().numpy(), list(dag.phi_per_output(p).values()), f"phi_{p} per output")


@pytest.mark.parametrize("case", CASES)
def test_gamma_is_the_curvature_of_the_path_norm(case):
    """At p = 2: grad(phi^2) = 2 gamma w for any weights, shared ones included. Independent of adjoints,
    since it goes through autograd."""
    model, graph = build(case), traced(case)
    phi = pathsgd.path_norm(model, graph, 2)
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(phi**2, list(model.parameters()))
    found = measure_gammas(graph, graph.tensors(model), 2)
    for name, grad in zip(names, grads, strict=True):
        weight = model.get_parameter(name).detach()
        assert_close(grad.numpy(), (2 * found[name].dense() * weight).numpy(), name)


@pytest.mark.parametrize("case", CASES)
def test_the_path_vector_itself(case):
    """Every product along every path, with its sign; the order and the names of paths are free."""
    model = build(case)
    _, dag = oracle(case)
    expected = sorted(value for value in dag.path_vector().values() if value)
    found = pathsgd.path_vector(model, model.example())
    assert_close(sorted(value for value in found.values() if value), expected, "path vector")


def test_path_vectors_are_for_small_networks():
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 30))
    with pytest.raises(ValueError, match="paths"):
        pathsgd.path_vector(model)
    squares = nn.Sequential(nn.Linear(2, 2), Squares(), nn.Linear(2, 2))
    with pytest.raises(pathsgd.PathError, match="squares"):
        pathsgd.path_vector(squares)


class Squares(nn.Module):
    def forward(self, x):
        return x.relu().square()


class UnitByUnit(nn.Module):
    """Any DAG as a torch module: every hidden unit reads any units before it, through its own weights."""

    def __init__(self, inputs, tails):
        super().__init__()
        self.inputs, self.tails = inputs, tails
        self.weights = nn.ParameterList(torch.randn(len(t), 1, dtype=torch.float64) for t in tails)
        self.biases = nn.ParameterList(torch.randn(1, dtype=torch.float64) for _ in tails)

    def forward(self, x):
        values = list(x.split(1, 1))
        for tails, weight, bias in zip(self.tails, self.weights, self.biases, strict=True):
            values.append(torch.relu(torch.cat([values[t] for t in tails], 1) @ weight + bias))
        return torch.cat(values[-2:], 1)

    def dag(self):
        weights, linear = {}, []
        for k, (tails, weight, bias) in enumerate(zip(self.tails, self.weights, self.biases, strict=True)):
            unit = self.inputs + k
            weights.update({(t, unit): w for t, w in zip(tails, weight.flatten().tolist(), strict=True)})
            weights["one", unit] = bias.item()
        last = self.inputs + len(self.tails)
        outputs = ["first", "second"]
        weights.update({(last - 2, "first"): 1.0, (last - 1, "second"): 1.0})
        read = {t for tails in self.tails for t in tails}
        inputs = [t for t in range(self.inputs) if t in read]
        return Dag(weights, inputs, outputs, constants=["one"], linear=linear, fixed=list(weights)[-2:])


@settings(max_examples=10)
@given(data=st.data(), p=st.sampled_from(EXPONENTS), seed=st.integers(0, 2**31 - 1))
def test_random_dags(data, p, seed):
    torch.manual_seed(seed)
    inputs = data.draw(st.integers(1, 3))
    tails = [
        sorted(data.draw(st.sets(st.integers(0, inputs + k - 1), min_size=1, max_size=4)))
        for k in range(data.draw(st.integers(2, 6)))
    ]
    model = UnitByUnit(inputs, tails)
    dag = model.dag()
    example = torch.randn(2, inputs, dtype=torch.float64)
    graph = pathsgd.trace(model, example)
    assert_close(pathsgd.path_norm(model, graph, p).item(), dag.phi(p), "phi")
    assert_close(pathsgd.group_norm(model, graph, p, 3).item(), dag.mu(p, 3), "mu")
    gamma = dag.gamma(p)
    found = measure_gammas(graph, graph.tensors(model), p)
    for k, unit_tails in enumerate(tails):
        unit = inputs + k
        if graph.parameters[f"weights.{k}"].normalised:
            expected = [gamma[t, unit] for t in unit_tails]
            assert_close(found[f"weights.{k}"].dense().flatten().numpy(), expected, f"weights.{k}")
            assert_close(found[f"biases.{k}"].dense().numpy(), [gamma["one", unit]], f"biases.{k}")
    before = model(example).detach()
    if unit_classes_of(graph).count > 1:
        pathsgd.unbalance(model, graph, units=10)
    assert_close(model(example).detach().numpy(), before.numpy(), "function")
    assert_close(pathsgd.path_norm(model, graph, p).item(), dag.phi(p), "phi after rescaling")


def test_a_broken_oracle_is_noticed():
    """The comparison can fail: leave one bias out, or count a tied weight once."""
    model = build(Tied)
    graph = pathsgd.trace(model, model.example())
    net = Unroller()
    w = parameters(model)
    x = net.relu(net.linear(net.input((3,)), w["a.weight"]))
    x = net.relu(net.linear(x, w["a.weight"]))
    dag = net.dag(net.linear(x, w["a.weight"].T))
    found = measure_gammas(graph, graph.tensors(model), 2)["a.weight"].dense().numpy()
    assert not np.allclose(found, net.parameter_gamma(dag, 2)["a.weight"], rtol=1e-3)


@given(
    widths=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    bias=st.booleans(),
    p=st.sampled_from(EXPONENTS),
    seed=st.integers(0, 2**31 - 1),
    zeros=st.floats(0, 0.6),
)
def test_random_mlps(widths, bias, p, seed, zeros):
    torch.manual_seed(seed)
    layers = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out, bias=bias), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).double()
    for parameter in model.parameters():
        parameter.data.normal_().mul_(torch.rand_like(parameter) > zeros)
    net = Unroller()
    w = parameters(model)
    x = net.input((widths[0],))
    for k in range(0, len(model), 2):
        x = net.linear(x, w[f"{k}.weight"], w.get(f"{k}.bias"))
        x = net.relu(x) if k + 1 < len(model) else x
    dag = net.dag(x)
    found = dense_gammas(model, p=p)
    for name, expected in net.parameter_gamma(dag, p).items():
        if len(widths) > 2:
            assert_close(found[name].numpy(), expected, name)
    assert_close(pathsgd.path_norm(model, p=p).item(), dag.phi(p), "phi")
    for q in (1, 2, math.inf):
        assert_close(pathsgd.group_norm(model, p=p, q=q).item(), dag.mu(p, q), "mu")
