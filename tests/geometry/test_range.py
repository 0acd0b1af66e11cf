"""Depth, imbalance, zeros: nothing overflows, nothing that is alive is lost, and nothing is NaN."""

from __future__ import annotations

import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd.geometry.gamma import measure_gammas
from support.networks import SmallResNet, build, dense_gammas

DEPTH = 300


def chain(depth, width, bias=False):
    layers = []
    for _ in range(depth):
        layers += [nn.utils.skip_init(nn.Linear, width, width, bias=bias), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=math.sqrt(2 / width))
    return model


@torch.no_grad()
def log_phi_reference(model, orders):
    """log phi_p by logarithms in fp64, layer by layer: slow, and blind to any range."""
    sums = {p: torch.zeros(model[0].in_features, dtype=torch.float64) for p in orders}
    for layer in model:
        if isinstance(layer, nn.Linear):
            logs = layer.weight.double().abs().log()
            for p in orders:
                sums[p] = torch.logsumexp(p * logs + sums[p], 1)
                if layer.bias is not None:
                    sums[p] = torch.logaddexp(sums[p], p * layer.bias.double().abs().log())
    return {p: torch.logsumexp(total, 0).item() / p for p, total in sums.items()}


@torch.no_grad()
def test_hundreds_of_layers_before_and_after_rescaling():
    width, orders = 24, (1, 2)
    model = chain(DEPTH, width)
    graph = pathsgd.trace(model)
    expected = log_phi_reference(model, orders)
    found = {p: pathsgd.path_norm(model, graph, p, log=True).item() for p in orders}
    for p in orders:
        assert found[p] == pytest.approx(expected[p], rel=1e-6)
        assert_alive(measure_gammas(graph, graph.tensors(model), p))
    generator = torch.Generator().manual_seed(0)
    factors = {
        str(2 * k): torch.exp2(torch.randint(-10, 11, (width,), generator=generator).double())
        for k in range(DEPTH - 1)
    }
    pathsgd.rescale(model, graph, factors)
    for p in orders:
        # Gammas that are powers of two change no mantissa: equal, not close.
        assert pathsgd.path_norm(model, graph, p, log=True).item() == found[p]
        assert_alive(measure_gammas(graph, graph.tensors(model), p))


@torch.no_grad()
def test_depth_with_biases():
    orders = (1, 1.5, 2, 8)
    model = chain(120, 16, bias=True)
    graph = pathsgd.trace(model)
    expected = log_phi_reference(model, orders)
    for p in orders:
        assert pathsgd.path_norm(model, graph, p, log=True).item() == pytest.approx(expected[p], rel=1e-6)
        assert_alive(measure_gammas(graph, graph.tensors(model), p))


def assert_alive(found):
    """Every unit's path weight is a positive, finite mantissa: no weight is frozen by underflow."""
    for gamma in found.values():
        for part in gamma.factors:
            assert bool((part.mantissa > 0).all())
            assert bool(torch.isfinite(part.mantissa).all())


def test_a_broken_range_is_noticed(monkeypatch):
    """Without exponents the same networks give inf or 0."""
    monkeypatch.setattr("pathsgd.geometry.scaled.Arithmetic.center", lambda self, x: x)
    with pytest.raises(pathsgd.PathError, match="more than fp64 can hold"):
        pathsgd.gammas(chain(200, 64), p=1)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [10, 40, 100])
def test_imbalance_in_fp32_is_exact(p, size):
    """Units scaled by up to 2^+-size: the same mantissas, whatever range is needed to compute them."""
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    graph = pathsgd.trace(model)
    before = {n: g.log2() for n, g in measure_gammas(graph, graph.tensors(model), p).items()}
    weights = {n: w.detach().double().abs().log2() for n, w in model.named_parameters()}
    phi = pathsgd.path_norm(model, graph, p).item()
    drawn = torch.randint(-size // 2, size // 2 + 1, (2, 6), generator=torch.Generator().manual_seed(size))
    factors = torch.exp2(drawn.double())
    pathsgd.rescale(model, graph, {"0": factors[0], "2": factors[1]})
    assert pathsgd.path_norm(model, graph, p).item() == phi
    after = {n: g.log2() for n, g in measure_gammas(graph, graph.tensors(model), p).items()}
    for name, w in model.named_parameters():
        invariant = 2 * w.detach().double().abs().log2() + after[name]
        assert torch.allclose(invariant, 2 * weights[name] + before[name], rtol=0, atol=1e-12)


def test_underflow_is_told_from_death():
    """A unit whose weights are tiny is alive and keeps its gamma; one whose weights are zero has none."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    graph = pathsgd.trace(model)
    with torch.no_grad():
        model[0].weight[0] = 1e-30
        model[0].weight[1] = 0
    found = measure_gammas(graph, graph.tensors(model), 2)
    log2 = found["2.weight"].log2().flatten()
    assert log2[0].item() == pytest.approx(math.log2(2e-60), rel=1e-6)
    assert log2[1].item() == -math.inf
    with torch.no_grad():
        model[0].weight[0] = 1
    found = measure_gammas(graph, graph.tensors(model), 2)
    assert found["2.weight"].dense()[0, 1] == 0


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, math.inf])
def test_zeros_give_zeros(p):
    model, x = build(SmallResNet, torch.float32)
    with torch.no_grad():
        model.stages[1].conv1.weight.zero_()
        model.stages[1].norm2.weight.zero_()
        model.stages[0].norm1.weight[0], model.stages[0].norm1.bias[0] = 0, 0
        model.head.weight[:, 3] = 0
    graph = pathsgd.trace(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = measure_gammas(graph, graph.tensors(model), p)
        model.train()(x).sum().backward()
        for name, parameter in model.named_parameters():
            gamma = found[name].dense()
            assert bool(torch.isfinite(gamma).all()), name
            # geometry.md: gamma = 0 implies a zero gradient, so that 0/0 := 0 loses nothing.
            assert not parameter.grad[gamma == 0].any(), name
        phi = pathsgd.path_norm(model, graph, p)
        model.zero_grad()
        phi.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("log", [False, True])
def test_a_network_of_zeros(log):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.data.zero_()
    phi = pathsgd.path_norm(model, log=log)
    assert phi.item() == (-math.inf if log else 0)
    phi.backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())
    # The output biases are the only weights no other weight multiplies.
    gamma = dense_gammas(model)
    assert {name for name, value in gamma.items() if value.any()} == {"2.bias"}
    assert pathsgd.group_norm(model).item() == 0
    assert pathsgd.balance(model) == 0
    assert pathsgd.rescaling_equivalent(model, model)


def test_empty_batches_and_empty_layers():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    expected = dense_gammas(model)
    found = dense_gammas(model, torch.zeros(0, 3))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it cannot initialise nothing
        empty = nn.Sequential(nn.Linear(3, 0), nn.ReLU(), nn.Linear(0, 2))
    assert torch.isfinite(pathsgd.path_norm(empty))
    assert dense_gammas(empty)["0.weight"].shape == (0, 3)


def test_the_log_is_differentiable_where_the_norm_overflows():
    model = chain(300, 16)
    phi = pathsgd.path_norm(model, p=8, log=True)
    phi.backward()
    # Euler: phi is homogeneous of degree one in the weights of each layer.
    for layer in (model[0], model[300], model[-1]):
        assert (layer.weight.grad * layer.weight).sum().item() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("p", [16, 33, 64])
def test_high_orders(p):
    """phi_p and mu_{p,q} go to their limits at p = inf without leaving the range on the way."""
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    reference = log_phi_reference(model, [p])[p]
    assert pathsgd.path_norm(model, p=p, log=True).item() == pytest.approx(reference, rel=1e-5)
    limit = pathsgd.group_norm(model, p=math.inf).item()
    assert limit <= pathsgd.group_norm(model, p=p).item() <= limit * 65 ** (1 / p) * 1.001
    assert all(torch.isfinite(gamma.log2()).all() for gamma in pathsgd.gammas(model, p=p).values())


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_group_norms_of_large_and_small_weights(size):
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))
    model[0].weight.data *= size
    model[2].weight.data *= size
    expected = max(layer.weight.double().norm(dim=1).max().item() for layer in model[::2])
    assert pathsgd.group_norm(model).item() == pytest.approx(expected, rel=1e-5)


def test_balancing_twice_changes_nothing_in_fp32():
    graph = pathsgd.trace(*build(SmallResNet, torch.float32))
    for seed in range(5):
        model, _ = build(SmallResNet, torch.float32)
        pathsgd.unbalance(model, graph, generator=torch.Generator().manual_seed(seed))
        pathsgd.balance(model, graph)
        before = [p.clone() for p in model.parameters()]
        pathsgd.balance(model, graph)
        assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(("p", "bias"), [(2, 1e-30), (4, 1e-13)])
def test_a_small_bias_that_is_all_a_unit_has_is_not_lost(p, bias):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, bias
    graph = pathsgd.trace(model)
    found = measure_gammas(graph, graph.tensors(model), p)
    gamma = found["2.weight"].log2()[0, 1]
    assert gamma.item() == pytest.approx(2 * math.log2(bias), rel=1e-6)


def test_weights_that_fp64_cannot_hold_are_refused():
    """A unit rescaled by 2^-600: path weights of its layer differ by 2^1200. Balance brings it back."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False)).double()
    graph = pathsgd.trace(model)
    before = pathsgd.path_norm(model, graph).item()
    pathsgd.rescale(model, graph, {("0", 1): 2.0**-600})
    for measure in (pathsgd.gammas, pathsgd.path_norm):
        with pytest.raises(pathsgd.PathError, match="more than fp64 can hold"):
            measure(model, graph)
    pathsgd.balance(model, graph)
    assert pathsgd.path_norm(model, graph).item() == pytest.approx(before, rel=1e-14)


def test_what_is_computed_in_inference_mode_is_no_obstacle_afterwards():
    """The memory that powers are computed in is kept: in a new thread, it is made in inference mode."""
    model = chain(2, 4)
    graph = pathsgd.trace(model)

    def both():
        with torch.inference_mode():
            first = dense_gammas(model, graph)
        second = dense_gammas(model, graph)
        return all(torch.equal(first[name], second[name]) for name in first)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(both).result()


class LeavesOut(nn.Module):
    """Keeps two of four units, which are dead, and adds what is small."""

    def __init__(self, keep, dead):
        super().__init__()
        self.a, self.b = (nn.Linear(2, n, bias=False, dtype=torch.float64) for n in (4, 2))
        self.keep = keep
        with torch.no_grad():
            self.a.weight.fill_(1e200)[list(dead)] = 0
            self.b.weight.fill_(1e-200)

    def forward(self, x):
        return (self.keep(self.a(x).relu()) + self.b(x)).relu()


LEAVE_OUT = {
    "pad": (lambda h: nn.functional.pad(h, (0, -2)), (0, 1)),
    "nearest": (lambda h: nn.functional.interpolate(h[:, None], size=2)[:, 0], (0, 2)),
    "slice": (lambda h: h[:, :2], (0, 1)),
    "roll": (lambda h: h.roll(1, 1)[:, :2], (0, 3)),
}


@pytest.mark.parametrize("how", LEAVE_OUT)
def test_units_that_are_left_out_set_no_exponent(how):
    model = LeavesOut(*LEAVE_OUT[how])
    norm = pathsgd.path_norm(model, torch.zeros(1, 2).double(), log=True)
    assert norm.item() == pytest.approx(math.log(2e-200), rel=1e-12)


def test_an_empty_axis_that_is_flipped():
    model = nn.Sequential(nn.Linear(2, 4), Flipped(), nn.Linear(4, 2))
    assert pathsgd.path_norm(model, torch.zeros(1, 2)) > 0


class Flipped(nn.Module):
    def forward(self, x):
        return torch.cat([x, x[:, :0].flip(1)], 1).relu()
