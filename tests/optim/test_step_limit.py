"""max_relative_step: no unit moves by more than a fraction of itself, in any equivalent network."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import PathNormalized, PathSGD
from support.networks import NETWORKS, Mlp, build, traced
from support.training import backward, weights


class ZeroBranch(nn.Module):
    """``y = x + g * W(x)`` with g = 0: paths that are dead at first and nearly so at the second step."""

    def __init__(self):
        super().__init__()
        self.stem, self.w, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.g = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = self.stem(x).relu()
        return self.head((x + self.g * self.w(x)).relu())


MAKERS = {
    "PathSGD": PathSGD,
    "PathNormalized": lambda *args, **options: PathNormalized(torch.optim.SGD, *args, **options),
}


def second_step(make, **options):
    """How far W and g have moved in the second step, as a fraction of themselves."""
    torch.manual_seed(0)
    model, x = ZeroBranch().double(), torch.randn(8, 4, dtype=torch.float64)
    optimizer = make(model, x, lr=1e-4, **options)
    for _ in range(2):
        before = copy.deepcopy(model)
        backward(model, x)
        optimizer.step()
    return [
        ((new - old).norm() / old.norm()).item()
        for old, new in ((before.w.weight, model.w.weight), (before.g, model.g))
    ]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_branch_that_starts_at_zero(make):
    free, _ = second_step(make)
    assert free > 0.5  # whatever the lr: so that the test can fail
    limited, gain = second_step(make, max_relative_step=0.05)
    assert 0 < limited <= 0.06  # the weights are measured in other coordinates
    assert 0 < gain <= 0.05 * (1 + 1e-12)


def unit_norms(model, steps, p):
    """(||dz||, ||z||) of every unit of a Linear-ReLU stack, row by row with its bias."""
    gammas = {name: gamma.dense() for name, gamma in pathsgd.gammas(model, p=p).items()}
    for k, module in enumerate(model):
        if isinstance(module, nn.Linear):
            for row in range(module.out_features):
                both = []
                for of in (steps, dict(model.named_parameters())):
                    parts = [
                        of[f"{k}.{name}"].detach()[row].flatten()
                        * gammas[f"{k}.{name}"][row].flatten().sqrt()
                        for name in ("weight", "bias")
                    ]
                    both.append(torch.linalg.vector_norm(torch.cat(parts), p).item())
                yield k, row, both


@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_unit_obeys_and_keeps_its_direction(make, p):
    model, x = build(Mlp)
    with torch.no_grad():
        model[0].bias.zero_()
    free = copy.deepcopy(model)
    for m, options in ((free, {}), (model, {"max_relative_step": 0.01})):
        before = weights(m)
        backward(m, x)
        make(m, traced(Mlp), lr=0.1, p=p, **options).step()
        steps = {
            name: (new - old).detach()
            for (name, new), old in zip(m.named_parameters(), before, strict=True)
        }  # fmt: skip
        for parameter, old in zip(m.parameters(), before, strict=True):
            parameter.data.copy_(old)
        if m is free:
            wanted, moves = steps, {(k, row): both for k, row, both in unit_norms(m, steps, p)}
            continue
        assert (steps["0.bias"] != 0).any()  # a bias of zero is not held at zero
        shortened = 0
        for k, row, (step, size) in unit_norms(m, steps, p):
            asked, _ = moves[k, row]
            factor = min(1.0, 0.01 * size / asked) if asked else 1.0
            shortened += factor < 1
            assert step == pytest.approx(min(asked, 0.01 * size), rel=1e-9)
            for name in (f"{k}.weight", f"{k}.bias"):
                assert torch.allclose(steps[name][row], factor * wanted[name][row], rtol=1e-7, atol=1e-16)
        assert shortened > 0


def test_a_layer_of_zeros_is_free_to_move():
    model, x = build(Mlp)
    nn.init.zeros_(model[4].weight), nn.init.zeros_(model[4].bias)
    optimizer = PathSGD(model, traced(Mlp), lr=0.1, max_relative_step=0.01)
    torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2])).backward()
    optimizer.step()
    assert (model[4].weight != 0).any()


@pytest.mark.parametrize("network", NETWORKS)
def test_a_limit_that_never_binds_changes_nothing(network):
    model, x = build(network)
    other = copy.deepcopy(model)
    for m, options in ((model, {"implementation": "reference"}), (other, {"max_relative_step": 1e6})):
        backward(m, x)
        PathSGD(m, traced(network), lr=1e-3, **options).step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_groups_have_their_own_limits():
    model, x = build(Mlp)
    graph = pathsgd.trace(model, x[:1])
    before = weights(model)
    optimizer = PathSGD(
        [
            {"params": [model[0].weight, model[0].bias], "max_relative_step": 1e-9},
            {"params": [model[2].weight]},
        ],
        graph=graph,
        lr=0.1,
    )
    backward(model, x)
    optimizer.step()
    moved = [(p - b).norm().item() for p, b in zip(model.parameters(), before, strict=True)]
    assert moved[0] < 1e-7 < moved[2]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_invalid_limit(make):
    model, _ = build(Mlp)
    with pytest.raises(ValueError, match="Invalid max_relative_step value: 0"):
        make(model, traced(Mlp), lr=0.1, max_relative_step=0)
