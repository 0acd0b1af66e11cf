"""BalancedMuon's step by Triton kernels against that in ordinary operations; here by Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from pathsgd import BalancedMuon, trace
from support.networks import Convolutions, Mlp, Packed, Recurrent, Transformer, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(network):
    model, x = build(network, torch.float32)
    training = network in (Recurrent, Convolutions)  # cudnn wants that of an RNN
    return model.to(DEVICE).train(training), x.to(DEVICE)


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
    step.kernels = step.kernels or KernelStep(step.table, step.state, step.find_momenta, step.decide)
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
