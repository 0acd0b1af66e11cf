"""A network and its rescaled copy train alike: in any optimizer after ``balance``, in BalancedMuon always."""

from __future__ import annotations

import functools

import pytest
import torch

import pathsgd
from pathsgd import BalancedMuon
from pathsgd.muon import balanced_muon, round, upkeep
from support import cases, networks, starts
from support.old_torch import MUON
from support.starts import KINDS, NETWORKS, Deep, Explosive, LowRank, ZeroHead, by_name, rescale, traced


def build(network, dtype=torch.float64):
    """(model, a batch); a batch norm's bias has no effect in training alone."""
    model, x = starts.build(network)
    return model.to(dtype).train(network is networks.Biased), x if x.dtype == torch.int64 else x.to(dtype)


def outputs(model, x):
    y = model(x)
    return torch.cat([part.reshape(len(part), -1) for part in (y if isinstance(y, tuple) else (y,))], 1)


def train(model, optimizers, x, steps=5, before_step=None):
    """Outputs after training; ``before_step`` has what is called before some of the steps."""
    for step in range(steps):
        if step in (before_step or ()):
            before_step[step]()
        for optimizer in optimizers:
            optimizer.zero_grad()
        y = outputs(model, x)
        targets = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()
        (y - targets).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return outputs(model, x).detach()


def make_muon(model, graph, **options):
    """For matrices; for the rest SGD."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    made = [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
    return [*made, torch.optim.SGD(others, lr=1e-3)] if others else made


OPTIMIZERS = {
    "AdamW": lambda m, g: [torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1)],
    "SGD": lambda m, g: [torch.optim.SGD(m.parameters(), lr=1e-4, momentum=0.9)],
    "Muon": make_muon,
    "BalancedMuon": lambda m, g, **options: [BalancedMuon(m, g, **options)],
}


def start(network, name, kind=None, dtype=torch.float64, **options):
    """(model, optimizers, a batch) of a copy rescaled in this way, or of the original."""
    graph = traced(network)
    model, x = build(network, dtype)
    if kind is not None:
        rescale(model, graph, kind)
    if name != "BalancedMuon":
        pathsgd.balance(model, graph)
    return model, OPTIMIZERS[name](model, graph, **options), x


def difference(network, name, *kinds, steps=5, rescaled_at=(), rescaled_first=True, **options):
    """Between the original and copies that are rescaled, before training and before some of the steps: the
    largest of those of outputs, relative to how far training moved them, and of weights, relative to the norm
    of their parameter."""
    model, optimizers, x = start(network, name, **options)
    before = outputs(model, x).detach()
    after = train(model, optimizers, x, steps)
    movement = (after - before).norm()
    assert movement > 1e-4 * before.norm()
    largest = torch.zeros((), dtype=after.dtype)
    for kind in kinds:
        other, optimizers, x = start(network, name, kind if rescaled_first else None, **options)
        again = {step: functools.partial(rescale, other, traced(network), kind) for step in rescaled_at}
        end = train(other, optimizers, x, steps, again)
        largest = torch.maximum(largest, (end - after).norm() / movement)
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            largest = torch.maximum(largest, (p - q).norm() / q.norm().clamp(min=1e-30))
    return largest.item()


def bound(network):
    """Gradients of biases that are zero but for rounding are normalised to steps: before a batch norm, of
    keys."""
    return 1e-9 if network in (networks.Biased, networks.Transformer) else 1e-11


FREE = [cases.Mlp, networks.Transformer, LowRank, ZeroHead, Explosive]


@pytest.mark.parametrize("network", NETWORKS, **by_name)
def test_adamw_after_balance(network):
    assert difference(network, "AdamW", *KINDS) <= bound(network)


@pytest.mark.parametrize("name", ["SGD", MUON])
@pytest.mark.parametrize("network", FREE, **by_name)
def test_other_optimizers_after_balance(network, name):
    """The balanced weights are the same, so that few networks are enough."""
    assert difference(network, name, *KINDS) <= bound(network)


@pytest.mark.parametrize("network", NETWORKS, **by_name)
def test_balanced_muon_from_every_start(network):
    assert difference(network, "BalancedMuon", *KINDS) <= bound(network)


@pytest.mark.parametrize("network", NETWORKS, **by_name)
def test_balanced_muon_when_a_copy_is_rescaled_in_mid_training(network, monkeypatch):
    """Before the third step and, after a round of upkeep, before the fifth."""
    monkeypatch.setattr(round, "EVERY", 3)
    options = {"steps": 6, "rescaled_at": (2, 4), "rescaled_first": False}
    assert difference(network, "BalancedMuon", "log-normal", "one unit", **options) <= bound(network)


@pytest.mark.parametrize("network", NETWORKS, **by_name)
def test_powers_of_two_give_the_same_bits(network, monkeypatch):
    """In fp32, at the start and in mid-training."""
    monkeypatch.setattr(round, "EVERY", 3)
    options = {"steps": 6, "rescaled_at": (2, 4), "dtype": torch.float32}
    assert difference(network, "BalancedMuon", "powers of two", **options) == 0


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"growth": 0.0}, {"nesterov": False}], ids=str)
def test_with_every_option(options):
    options = {"steps": 12, "rescaled_at": (4,), **options}
    assert difference(cases.Residual, "BalancedMuon", "log-normal", **options) <= 1e-11


def test_a_network_of_300_layers():
    """Any optimizer trains it alike: weights are the same after balancing."""
    graph = traced(Deep)
    model, x = build(Deep)
    other = starts.rescaled(model, graph, "log-normal")
    # In so many layers longer steps magnify rounding.
    optimizers = [[BalancedMuon(m, graph, lr=0.005)] for m in (model, other)]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p - q).norm() <= 1e-9 * q.norm()
    before = outputs(model, x).detach()
    after = train(model, optimizers[0], x, 4)
    end = train(other, optimizers[1], x, 4, {2: lambda: rescale(other, graph, "log-normal")})
    assert (after - before).norm() > 1e-2 * before.norm()
    assert (end - after).norm() <= 1e-9 * (after - before).norm()


# So that these tests can fail


@pytest.mark.parametrize("network", FREE, **by_name)
def test_without_the_balance_steps_differ(network, monkeypatch):
    monkeypatch.setattr(upkeep.Upkeep, "_scale", lambda *_, **__: None)
    assert difference(network, "BalancedMuon", "log-normal") > 1e-2


@pytest.mark.parametrize("network", FREE, **by_name)
def test_without_undoing_steps_differ(network, monkeypatch):
    """Balancing again is not enough: upkeep lags the minimum a little."""
    monkeypatch.setattr(upkeep.Upkeep, "_undo_rescaling", lambda *_: False)
    options = {"rescaled_at": (2,), "rescaled_first": False}
    assert difference(network, "BalancedMuon", "log-normal", **options) > 1e-4


def test_without_a_bound_for_noise_a_bias_before_batch_norm_moves_by_rounding(monkeypatch):
    assert difference(networks.Biased, "BalancedMuon", *KINDS, dtype=torch.float32) < 1e-4
    monkeypatch.setattr(balanced_muon, "NOISE", 0.0)
    assert difference(networks.Biased, "BalancedMuon", *KINDS, dtype=torch.float32) > 1e-1


@pytest.mark.parametrize("name", ["AdamW", "SGD", MUON])
def test_without_balance_optimizers_are_not_invariant(name, monkeypatch):
    monkeypatch.setattr(pathsgd, "balance", lambda *_: None)
    assert difference(cases.Mlp, name, "log-normal") > 1e-2
