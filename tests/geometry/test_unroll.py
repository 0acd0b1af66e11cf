"""Unrolled networks compute what torch computes, so the Dags that other tests trust are right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.unroll import Unroller, parameter, parameters

EXPONENTS = (1.0, 1.5, 2.0, 3.0, math.inf)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def double(*modules):
    model = nn.Sequential(*modules).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def assert_same(net, dag, expected, *inputs):
    """The Dag and torch agree on one example; ``expected`` has a batch axis of size one or none."""
    expected = expected.detach().numpy().reshape(-1)
    np.testing.assert_allclose(net.forward(dag, *inputs), expected, rtol=1e-12, atol=1e-12)


def mlp():
    model = double(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    w, net = parameters(model), Unroller()
    x = net.input((3,))
    x = net.relu(net.linear(x, w["0.weight"], w["0.bias"]))
    x = net.relu(net.linear(x, w["2.weight"], w["2.bias"]))
    x = net.linear(x, w["4.weight"], w["4.bias"])
    return model, net, net.dag(x), (3,)


def conv_and_pool():
    model = double(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 2, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2, 2),
    )
    w, net = parameters(model), Unroller()
    x = net.input((2, 4, 6))
    x = net.relu(net.conv(x, w["0.weight"], w["0.bias"], padding=1))
    x = net.conv(net.avg_pool(x, 2), w["3.weight"], w["3.bias"])
    x = net.adaptive_avg_pool(x, 1).reshape(-1)
    x = net.linear(x, w["6.weight"], w["6.bias"])
    return model, net, net.dag(x), (2, 4, 6)


def conv_batch_norm():
    model = double(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 2))
    w, net = parameters(model), Unroller()
    norm = model[1]
    x = net.conv(net.input((1, 3, 3)), w["0.weight"], w["0.bias"])
    x = net.batch_norm(x, w["1.weight"], w["1.bias"], norm.running_mean, norm.running_var, norm.eps)
    x = net.conv(net.relu(x), w["3.weight"], w["3.bias"])
    return model, net, net.dag(x), (1, 3, 3)


class Residual(nn.Module):
    """The stream is used with and without its activation, subtracted from and concatenated."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(6, 2)

    def forward(self, x):
        x = self.first(x)
        y = x - self.second(F.relu(x))
        return self.last(torch.cat([y[..., [2, 0, 1]], F.relu(y)], dim=-1))


def residual():
    model = Residual().double()
    w, net = parameters(model), Unroller()
    x = net.linear(net.input((3,)), w["first.weight"], w["first.bias"])
    branch = net.linear(net.relu(x), w["second.weight"], w["second.bias"])
    y = net.add(x, branch, signs=(1, -1))
    y = np.concatenate([y[[2, 0, 1]], net.relu(y)])
    return model, net, net.dag(net.linear(y, w["last.weight"], w["last.bias"])), (3,)


class Recurrent(nn.Module):
    """One weight at three times, and on one path up to three times over."""

    def __init__(self):
        super().__init__()
        self.inward, self.again = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)

    def forward(self, x):
        h = F.relu(self.inward(x[..., 0, :]))
        for t in (1, 2):
            h = F.relu(self.inward(x[..., t, :]) + self.again(h))
        return self.again(h)


def recurrent():
    model = Recurrent().double()
    w, net = parameters(model), Unroller()
    x = net.linear(net.input((3, 2)), w["inward.weight"], w["inward.bias"])
    h = net.relu(x[0])
    for t in (1, 2):
        h = net.relu(net.add(x[t], net.linear(h, w["again.weight"])))
    return model, net, net.dag(net.linear(h, w["again.weight"])), (3, 2)


NETWORKS = (mlp, conv_and_pool, conv_batch_norm, residual, recurrent)


@pytest.mark.parametrize("network", NETWORKS)
def test_network_computes_what_torch_does(network):
    model, net, dag, shape = network()
    for _ in range(5):
        x = randn(1, *shape)
        assert_same(net, dag, model(x), x)


@pytest.mark.parametrize("network", NETWORKS)
def test_gradient_is_autograds(network):
    """Summed over the edges that carry an element, times their factors."""
    model, net, dag, shape = network()
    x = randn(1, *shape)
    model(x).sum().backward()
    values = dict(zip(dag.inputs, x.flatten().tolist(), strict=True))
    slopes = dag.gradient(values, dict.fromkeys(dag.outputs, 1.0))
    for name, tensor in model.named_parameters():
        total = np.zeros(tensor.shape)
        for edge, label in net.labels.items():
            if label.name == name:
                total[label.index] += label.factor * slopes[edge]
        np.testing.assert_allclose(total, tensor.grad.numpy(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("p", EXPONENTS)
def test_gamma_by_enumeration_is_algorithm_1(network, p):
    _, _, dag, _ = network()
    assert dag.gamma(p) == pytest.approx(dag.gamma_algorithm1(p), rel=1e-10, abs=0.0)


@pytest.mark.parametrize("network", [mlp, conv_and_pool, recurrent])
@pytest.mark.parametrize("p", EXPONENTS[:-1])
def test_parameter_gamma_is_the_gradient_of_the_powered_network(network, p):
    """gamma = (dF/da)^(2/p), F being the network run on ones with weights a = |w|^p (kappa1)."""
    model, net, dag, shape = network()
    gamma = net.parameter_gamma(dag, p)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.abs_().pow_(p)
    if network is conv_and_pool:
        for layer, count in ((model[2], 4), (model[4], 2)):  # the weight of a mean is (1 / count)^p
            power = count ** (1 - p)
            layer.register_forward_hook(lambda _, x, y, power=power: y * power)
    total = model(torch.ones(1, *shape, dtype=torch.float64)).sum()
    total.backward()
    assert dag.phi(p) == pytest.approx(total.item() ** (1 / p), rel=1e-10)
    for name, tensor in model.named_parameters():
        np.testing.assert_allclose(gamma[name], tensor.grad.numpy() ** (2 / p), rtol=1e-10)


def test_parameter_gamma_for_infinity_is_the_heaviest_path():
    weight = parameter("w", torch.tensor([[2.0, 3.0], [0.5, 1.0]]))
    net = Unroller()
    x = net.linear(net.linear(net.input((2,)), weight), weight)
    gamma = net.parameter_gamma(net.dag(x), math.inf)["w"]
    # The element w[o, i] ends at o or starts at i: the largest w[j, o] or w[i, k] goes with it.
    np.testing.assert_allclose(gamma, [[9.0, 4.0], [9.0, 9.0]])


@pytest.mark.parametrize("p", EXPONENTS)
def test_parameter_gamma_of_batch_norm_is_its_formula(p):
    """gamma(weight) = ((gamma_in + |mean|^p) / sigma^p * gamma_out)^(2/p)."""
    w, b, head = randn(1), randn(1), randn(1)
    mean, var, eps = torch.tensor([-0.7]), torch.tensor([1.3]), 0.1
    net = Unroller()
    x = net.multiply(net.input((1,)), 1.5)
    x = net.batch_norm(x, parameter("w", w), parameter("b", b), mean, var, eps)
    x = net.multiply_by_parameter(x, parameter("head", head))
    gamma = net.parameter_gamma(net.dag(x), p)
    sigma, m, out = math.sqrt(var.item() + eps), abs(mean.item()), abs(head.item())
    before = max(1.5, m) if p == math.inf else (1.5**p + m**p) ** (1 / p)
    assert gamma["w"].item() == pytest.approx((before / sigma * out) ** 2, rel=1e-10)
    assert gamma["b"].item() == pytest.approx(out**2, rel=1e-10)


@pytest.mark.parametrize(
    ("shape", "channels", "kernel", "options"),
    [
        ((2, 7), 3, (3,), {}),
        ((2, 7), 3, (3,), {"stride": 2, "padding": 2, "dilation": 2}),
        ((4, 5, 6), 4, (3, 2), {"stride": (2, 1), "padding": (1, 0), "groups": 2}),
        ((3, 6, 5), 3, (2, 3), {"dilation": (2, 1), "groups": 3, "padding": 1}),
        ((1, 3, 3), 2, (1, 1), {"padding": 2, "stride": 2}),
        ((2, 3, 4, 3), 2, (2, 2, 2), {"stride": (1, 2, 1), "padding": (0, 1, 1)}),
    ],
)
def test_conv(shape, channels, kernel, options):
    weight = randn(channels, shape[0] // options.get("groups", 1), *kernel)
    bias, x = randn(channels), randn(*shape)
    function = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]
    for b in (bias, None):
        net = Unroller()
        named = None if b is None else parameter("b", b)
        y = net.conv(net.input(shape), parameter("w", weight), named, **options)
        expected = function(x[None], weight, b, **options)
        assert y.shape == expected.shape[1:]
        assert_same(net, net.dag(y), expected, x)


@pytest.mark.parametrize(
    ("shape", "channels", "kernel", "options"),
    [
        ((2, 4), 3, (3,), {}),
        ((2, 4), 3, (2,), {"stride": 3, "output_padding": 2}),
        ((4, 3, 2), 4, (3, 2), {"stride": (2, 3), "padding": (1, 0), "groups": 2}),
        ((2, 3, 3), 2, (2, 3), {"stride": 2, "dilation": (2, 1), "output_padding": (1, 0)}),
        ((2, 2, 2, 2), 2, (2, 1, 2), {"stride": 2, "padding": (1, 0, 0)}),
    ],
)
def test_conv_transpose(shape, channels, kernel, options):
    weight = randn(shape[0], channels // options.get("groups", 1), *kernel)
    bias, x = randn(channels), randn(*shape)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(kernel) - 1]
    for b in (bias, None):
        net = Unroller()
        named = None if b is None else parameter("b", b)
        y = net.conv_transpose(net.input(shape), parameter("w", weight), named, **options)
        expected = function(x[None], weight, b, **options)
        assert y.shape == expected.shape[1:]
        assert_same(net, net.dag(y), expected, x)


POOLING = [
    ((2, 7), (3,), {}),
    ((2, 7), (3,), {"stride": 2, "padding": 1}),
    ((1, 5, 6), (2, 3), {"stride": (2, 2), "padding": (1, 1)}),
    ((1, 5, 6), (2, 3), {"stride": (2, 2), "padding": (1, 1), "ceil_mode": True}),
    ((1, 6, 4), (3, 3), {"stride": 3, "padding": 1, "ceil_mode": True}),
    ((1, 3, 4, 3), (2, 2, 2), {"stride": (1, 2, 1), "padding": 1}),
]


@pytest.mark.parametrize(("shape", "kernel", "options"), POOLING)
@pytest.mark.parametrize("count_include_pad", [True, False])
def test_avg_pool(shape, kernel, options, count_include_pad):
    x, net = randn(*shape), Unroller()
    function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
    options = {**options, "count_include_pad": count_include_pad}
    y = net.avg_pool(net.input(shape), kernel, **options)
    assert_same(net, net.dag(y), function(x[None], kernel, **options), x)


def test_avg_pool_with_a_divisor_of_its_own():
    x, net = randn(1, 4, 4), Unroller()
    y = net.avg_pool(net.input((1, 4, 4)), 2, divisor_override=3)
    assert_same(net, net.dag(y), F.avg_pool2d(x[None], 2, divisor_override=3), x)


@pytest.mark.parametrize(("shape", "kernel", "options"), POOLING)
def test_max_pool_has_a_path_from_every_place_of_the_window(shape, kernel, options):
    """The inputs of a window are those that have a gradient when they are the largest."""
    net = Unroller()
    y = net.max_pool(net.input(shape), kernel, **options)
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    expected = set()
    for place in np.ndindex(*shape):
        x = torch.zeros(1, *shape)
        x[(0, *place)] = 1.0
        for s in function(x, kernel, **options)[0].nonzero().tolist():
            expected.add((str(list(place)), str(s)))
    found = {(f"[{path[0][0].split('[')[1]}", f"[{path[-1][1].split('[')[1]}") for path in net.dag(y).paths()}
    assert found == {(u.replace(" ", ""), v.replace(" ", "")) for u, v in expected}
    assert y.shape == function(torch.zeros(1, *shape), kernel, **options).shape[1:]


@pytest.mark.parametrize(("shape", "out"), [((2, 7), 3), ((1, 5, 4), (2, 3)), ((1, 2, 3), (3, 5))])
def test_adaptive_pool(shape, out):
    x, net = randn(*shape), Unroller()
    units = net.input(shape)
    average, largest = net.adaptive_avg_pool(units, out), net.adaptive_max_pool(units, out)
    function = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[len(shape) - 2]
    assert_same(net, net.dag(average), function(x[None], out), x)
    assert net.dag(largest).path_count == net.dag(average).path_count
    assert net.dag(largest).phi(math.inf) == 1.0


def test_linear_acts_on_the_last_axis():
    model, x, net = nn.Linear(3, 2).double(), randn(2, 2, 3), Unroller()
    w = parameters(model)
    y = net.linear(net.input((2, 2, 3)), w["weight"], w["bias"])
    dag = net.dag(y)
    assert_same(net, dag, model(x), x)
    assert net.parameter_gamma(dag, 1)["weight"].tolist() == [[16.0] * 3] * 2


def test_batch_norm_without_affine_has_fixed_edges():
    model = nn.BatchNorm1d(3, affine=False).double().eval()
    nn.init.normal_(model.running_mean)
    x, net = randn(1, 3, 2), Unroller()
    mean, var = model.running_mean, model.running_var
    dag = net.dag(net.batch_norm(net.input((3, 2)), None, None, mean, var))
    assert_same(net, dag, model(x), x)
    assert dag.mu(2, 2) == 0.0


def test_elementwise_operations_and_reductions():
    x, w, b, factor = randn(2, 3, 2), randn(3, 1), randn(2), randn(2, 1, 1)
    net = Unroller()
    y = net.multiply(net.input((2, 3, 2)), factor)
    y = net.multiply_by_parameter(y, parameter("w", w))
    y = net.shift_param(y, parameter("b", b))
    y = net.add(y, y.transpose(0, 1, 2)[::-1], y, signs=(1.0, -2.0, 0.5))
    outputs = [net.mean(y, (0, -1)), net.sum(y, 1, keepdim=True)]
    expected = x * factor * w + b
    expected = 1.5 * expected - 2.0 * expected.flip(0)
    expected = [expected.mean((0, -1)).flatten(), expected.sum(1, keepdim=True).flatten()]
    assert outputs[1].shape == (2, 1, 2)
    assert_same(net, net.dag(*outputs), torch.cat(expected), x)


def test_embedding_reads_one_hot_inputs():
    model, net = nn.Embedding(4, 3).double(), Unroller()
    tokens = torch.tensor([2, 0])
    dag = net.dag(net.embedding(net.input((2, 4)), parameters(model)["weight"]))
    assert_same(net, dag, model(tokens), F.one_hot(tokens, 4).double())
    assert net.parameter_gamma(dag, 2)["weight"].tolist() == [[2.0] * 3] * 4


def test_prelu_has_two_paths():
    net = Unroller()
    x = net.multiply(net.input((2, 2)), 3.0)
    dag = net.dag(net.prelu(x, parameter("a", torch.tensor([-0.5, 0.25]))))
    assert sorted(dag.path_vector().values()) == [-1.5, -1.5, 0.75, 0.75, 3.0, 3.0, 3.0, 3.0]
    assert net.parameter_gamma(dag, 1)["a"].tolist() == [36.0, 36.0]
    shared = net.prelu(x, parameter("b", torch.tensor([0.5])))
    assert net.parameter_gamma(net.dag(shared), 1)["b"].tolist() == [144.0]


def test_a_unit_used_twice_has_two_paths():
    """Duplicated columns of a linear layer would be parallel edges."""
    weight, x, net = randn(1, 2), randn(1), Unroller()
    dag = net.dag(net.linear(net.input((1,))[[0, 0]], parameter("w", weight)))
    assert dag.path_count == 2
    assert_same(net, dag, x.repeat(2) @ weight[0], x)


def test_a_transposed_parameter_keeps_its_own_shape():
    weight, x, net = randn(2, 3), randn(3), Unroller()
    w = parameter("w", weight)
    dag = net.dag(net.linear(net.linear(net.input((3,)), w), w.T))
    assert_same(net, dag, weight.T @ (weight @ x), x)
    assert net.parameter_gamma(dag, 2)["w"].shape == (2, 3)
