"""BalancedMuon's step by Triton kernels against that in ordinary operations; here by Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pathsgd import BalancedMuon, trace
from support.networks import Mlp, Recurrent, Transformer, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Convolutions(nn.Sequential):
    """Grouped, depthwise, transposed, with batch norm; more entries than a program goes over at a time."""

    example = (2, 3, 4, 4)

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 9, 3, padding=1),
            nn.BatchNorm2d(9),
            nn.ReLU(),
            nn.Conv2d(9, 60, 3, padding=1, groups=3, bias=False),
            nn.ReLU(),
            nn.Conv2d(60, 60, 3, padding=1, groups=60),
            nn.ReLU(),
            nn.ConvTranspose2d(60, 20, 2),
        )


class Packed(nn.Module):
    """Queries, keys and values in one matrix, once as rows and once, transposed, as columns; an embedding."""

    example = (2, 4, 6)

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 4, 6))
        self.rows = nn.Linear(6, 18)
        self.columns = nn.Parameter(torch.randn(6, 18))
        self.shift = nn.Parameter(torch.randn(18))
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = x + self.positions
        q, k, v = self.rows(x).chunk(3, -1)
        x = F.scaled_dot_product_attention(q, k, v)
        q, k, v = (x @ self.columns + self.shift).chunk(3, -1)
        return self.head(self.scale * F.scaled_dot_product_attention(q, k, v)).mean(1)


def make(network):
    if network in (Mlp, Recurrent, Transformer):
        model, x = build(network, torch.float32)
        return model.to(DEVICE).train(network is Recurrent), x.to(DEVICE)  # cudnn wants that of an RNN
    torch.manual_seed(0)
    return network().to(DEVICE), torch.randn(network.example, device=DEVICE)


def train(model, x, graph, kernels, steps, **options):
    optimizer = BalancedMuon(model, graph, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(x)
        F.cross_entropy(y.flatten(1), torch.arange(len(y), device=DEVICE) % 2).backward()
        if kernels:
            use_kernels(optimizer)
        else:
            moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            optimizer._find_step(moved).kernels = None
        optimizer.step()
    return optimizer


def use_kernels(optimizer):
    """They are taken on a GPU alone: here the interpreter runs them."""
    from pathsgd.muon.gpu.step import KernelStep

    moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    step = optimizer._find_step(moved)
    step.kernels = step.kernels or KernelStep(step)
    run = step.kernels.run

    def run_and_check():
        assert run()
        return True

    step.kernels.run = run_and_check


# Two samples give a recurrence gradients of low rank, of which 16 bits make noise in all other directions.
EXACT = [Recurrent] if DEVICE == "cpu" else []


@pytest.mark.parametrize("network", [Mlp, *EXACT, Transformer, Convolutions, Packed])
def test_they_take_the_same_steps(network):
    model, x = make(network)
    graph = trace(model, x)
    other = copy.deepcopy(model)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, x, graph, False, 3)
    train(other, x, graph, True, 3)
    check_steps(before, model, other)


def check_steps(before, model, other):
    """On a GPU kernels keep what is orthogonalised in 16 bits: directions agree, not digits."""
    for start, (name, p), q in zip(before, model.named_parameters(), other.parameters(), strict=True):
        a, b = p.detach() - start, q.detach() - start
        if DEVICE == "cpu":
            assert (a - b).norm() <= 1e-4 * a.norm() + 1e-6 * start.norm(), name
        elif a.norm() > 1e-6 * start.norm():
            assert torch.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.97, name


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1, "nesterov": False},
        {"growth": 0.0, "betas": (0.8, 0.9)},
        {"lr": torch.tensor(0.02)},
    ],
)
def test_with_every_option(options):
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    model, x = make(Mlp)
    graph = trace(model, x)
    other = copy.deepcopy(model)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, x, graph, False, 3, **options)
    train(other, x, graph, True, 3, **options)
    check_steps(before, model, other)


@pytest.mark.parametrize("network", [Mlp, *EXACT, Transformer, Convolutions])
def test_rounds_of_balancing_are_the_same(network):
    from pathsgd.muon.gpu.upkeep import KernelGather, KernelUpkeep
    from pathsgd.muon.round import MOST, Round

    model, x = make(network)
    graph = trace(model, x)
    other = copy.deepcopy(model)
    found = []
    for m in (model, other):
        optimizer = train(m, x, graph, False, 2)
        kept = optimizer._upkeep
        unbalance_a_little(m, kept)
        edges = {name: kept.units.parameters[name] for name in kept.parameters}
        if m is other:
            kernels = KernelUpkeep(kept.parameters, edges, kept.held)
            if network is Convolutions:  # a grouped kernel's inputs change along rows and columns
                assert not kernels.is_supported
                return
            kernels.steps += 3
            before = [p.clone() for p in m.parameters()]
            kernels.run(optimizer.state, 2, MOST)
            assert all(map(torch.equal, before, m.parameters())), "it was not due"
            kernels.run(optimizer.state, 3, MOST)
        else:
            Round(kept.parameters, edges, kept.held).run(optimizer.state)
        found.append([t for p in m.parameters() for t in (p, *states(optimizer, p))])
        states_of = [optimizer.state[p] for p in kept.parameters.values()]
        gather = KernelGather(list(kept.parameters.values()), states_of)
        gather.run()
        for p, part, state in zip(kept.parameters.values(), gather.parts, states_of, strict=True):
            assert torch.equal(part, p.detach().flatten()[state["reference_index"]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def states(optimizer, p):
    keys = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    return [optimizer.state[p][key].clone() for key in keys if key in optimizer.state[p]]


@torch.no_grad()
def unbalance_a_little(model, kept):
    from pathsgd.balance.rescale import apply_factors

    generator = torch.Generator().manual_seed(0)
    factors = torch.exp(0.3 * torch.randn(kept.units.count, generator=generator, dtype=torch.float64))
    apply_factors(dict(model.named_parameters()), kept.units, factors)
