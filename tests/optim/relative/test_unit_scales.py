"""Units keep their scale in a relative step; it changes nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from pathsgd.geometry.canonical import LEAST
from pathsgd.optim.relative.steps import RelativeSteps
from pathsgd.optim.relative.unit_scales import KEY
from torch import nn

from pathsgd import PathAdam, PathMuon, PathNormalized, trace
from pathsgd.graph.export import tensors_in
from support import cases, networks

OPTIMIZERS = {
    "PathMuon": PathMuon,
    "PathAdam": PathAdam,
    "SGD": lambda m, x, **kw: PathNormalized(torch.optim.SGD, m, x, relative=True, **{"lr": 0.05, **kw}),
}


class SquaredReLU(nn.Module):
    def forward(self, x):
        return x.relu().square()


def build(activation=nn.ReLU, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), activation(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    ).to(dtype)  # fmt: skip


def batch(k, dtype=torch.float64):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(32, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), (3 * x[:, 0] - 2 * x[:, 1] * x[:, 2]).sign().long() + 1


def train(model, optimizer, steps, start=0):
    for k in range(start, start + steps):
        x, y = batch(k, next(model.parameters()).dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def log_ratios(model):
    """Of what leads into and out of every unit of the first layer."""
    return (model[0].weight.norm(dim=1) / model[2].weight.norm(dim=0)).log().detach()


def leave_alone(monkeypatch):
    monkeypatch.setattr(RelativeSteps, "_rescale", lambda *_: None)


@pytest.mark.parametrize("activation", [nn.ReLU, SquaredReLU])
def test_scales_stay(activation, monkeypatch):
    """In 400 steps at a constant rate they drift ten times as far without."""

    def drift():
        model, (x, _) = build(activation, torch.float32), batch(0, torch.float32)
        before = log_ratios(model)
        train(model, PathMuon(model, x[:1], lr=0.06), 400)
        live = (model[:2](x) > 0).any(0)
        assert live.sum() > 8
        return (log_ratios(model) - before)[live].std()

    kept = drift()
    assert kept < 0.5
    leave_alone(monkeypatch)
    assert drift() > 8 * kept


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("activation", [nn.ReLU, SquaredReLU])
def test_nothing_else_changes(activation, name, monkeypatch):
    x = batch(0)[0]
    kept = build(activation)
    train(kept, OPTIMIZERS[name](kept, x[:1]), 20)
    leave_alone(monkeypatch)
    free = build(activation)
    train(free, OPTIMIZERS[name](free, x[:1]), 20)
    assert not torch.allclose(kept[0].weight, free[0].weight, rtol=1e-3)
    torch.testing.assert_close(kept(x), free(x), rtol=1e-9, atol=1e-9)


OTHERS = [networks.Recurrent, networks.Transformer, networks.PreActivation, networks.SmallResNet]


# Not BatchNorm: of a unit that is always on the gradient of the shift is rounding, which Adam's eps bounds.
NETWORKS = [case for case in (*cases.CASES, *OTHERS) if case is not cases.BatchNorm]


@pytest.mark.parametrize("case", NETWORKS, ids=lambda case: case.__name__)
def test_nothing_else_changes_in_any_network(case, monkeypatch):
    graph = None
    ends = []
    for kept in (True, False):
        if not kept:
            leave_alone(monkeypatch)
        torch.manual_seed(0)
        if case in cases.CASES:
            model = cases.build(case).double()
            x = model.example(4)
        else:
            model, x = networks.build(case, torch.float64)
        x = x.double() if x.is_floating_point() else x
        graph = graph or trace(model, x[:1])
        optimizer = PathMuon(model.train(), graph)
        for _ in range(6):
            torch.manual_seed(1)  # of dropout
            optimizer.zero_grad()
            # Not the square alone, which a batch norm at the end keeps at 1.
            sum(
                (y - y.new_ones(y.numel()).cumsum(0).view_as(y).sin()).square().mean()
                for y in tensors_in(model(x))
            ).backward()
            optimizer.step()
        torch.manual_seed(1)
        # In training mode: a bias before a batch norm moves by rounding alone, which running means follow.
        with torch.no_grad():
            ends.append([*tensors_in(model(x))])
    torch.testing.assert_close(*ends, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_units_of_a_frozen_layer_are_left_alone(name, monkeypatch):
    """Rescaling what leads into them alone would change the function."""
    models = []
    for rescaled in (True, False):
        model = build()
        model[2].weight.requires_grad_(False)
        if not rescaled:
            leave_alone(monkeypatch)
        train(model, OPTIMIZERS[name](model, batch(0)[0][:1]), 10)
        models.append(model)
    torch.testing.assert_close(models[0](batch(0)[0]), models[1](batch(0)[0]), rtol=1e-9, atol=1e-9)
    assert torch.equal(models[0][2].weight, build()[2].weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_of_zero_changes_nothing(name):
    model, x = build(), batch(0)[0]
    optimizer = OPTIMIZERS[name](model, x[:1])
    train(model, optimizer, 5)
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, 2, 5)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_dead_unit_does_not_fade_away(monkeypatch):
    """Its weights have no gradient, and turning makes them smaller all the time."""

    def least(steps):
        model = build(dtype=torch.float32)
        with torch.no_grad():
            model[0].weight[3] = model[0].weight[3].abs()
            model[0].bias[3] = 0
        x = -torch.ones(1, 6)
        optimizer = PathMuon(model, x, lr=0.3)
        for k in range(steps):
            optimizer.zero_grad()
            inputs = -batch(k, torch.float32)[0].abs()
            nn.functional.cross_entropy(model(inputs), batch(k)[1]).backward()
            optimizer.step()
        return (model[0].weight[3].norm() * model[2].weight[:, 3].norm()).sqrt().item()

    assert 2.0 ** (-LEAST - 8) < least(150) < 2.0 ** (8 - LEAST)
    leave_alone(monkeypatch)
    assert least(150) < 2.0 ** (-LEAST - 16)


def test_the_scales_travel_in_the_state():
    model, x = build(), batch(0)[0]
    optimizer = PathMuon(model, x[:1])
    train(model, optimizer, 3)
    state = optimizer.state_dict()["state"][0][KEY]
    assert state.dtype == torch.float64
    again = PathMuon(model, x[:1])
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state_dict()["state"][0][KEY], state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_parameter_may_have_no_gradient_at_first(name):
    """torch makes state only where there is none, so that ours must not come first."""
    model, x = build(), batch(0)[0]
    optimizer = OPTIMIZERS[name](model, x[:1])
    model[0].weight.requires_grad_(False)
    train(model, optimizer, 2)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, 2)
    assert sum(KEY in state for state in optimizer.state_dict()["state"].values()) == 1
