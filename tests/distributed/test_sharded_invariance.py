"""Sharded models that are rescalings of each other take the same steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pathsgd.geometry.rescale import apply_factors
from torch.distributed.fsdp import fully_shard

from pathsgd import PathMuon
from pathsgd.graph.unit_classes import unit_classes_of
from support.ranks import run_on_ranks
from support.sharded import OPTIMIZERS, Mlp, batch, make, step_on, traced


def prepare():
    traced(Mlp)


def rescale(model, graph, exponent, powers_of_two):
    """Every unit times 2 to the power of up to +-exponent."""
    units = unit_classes_of(graph)
    drawn = torch.rand(units.count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = exponent * (2 * drawn - 1)
    apply_factors(graph.tensors(model), units, torch.exp2(drawn.round() if powers_of_two else drawn))
    return model


def train_rescaled():
    """The outputs of a network and of its rescaled copy after training; by powers of two in fp32, where one
    of them needs exponents, to the last bit."""
    rank, found = dist.get_rank(), {}
    x = batch(Mlp, 0, 0, torch.float64)[0]
    for name in ("PathMuon", "PathAdam", "PathSGD", "PathNormalized"):
        found[name] = []
        for exponent in (0, 9):
            model = fully_shard(rescale(make(Mlp), traced(Mlp), exponent, powers_of_two=False))
            optimizer = OPTIMIZERS[name](model, traced(Mlp))
            for step in range(6):
                step_on(model, optimizer, Mlp, step, range(rank, rank + 1))
            found[name].append(model(x).detach())
    bits, needed = [], []
    for exponent in (0, 40):
        model = rescale(make(Mlp).float(), traced(Mlp), exponent, powers_of_two=True)
        fully_shard(model)
        optimizer = PathMuon(model, traced(Mlp), lr=0.02)
        for _ in range(4):
            optimizer.zero_grad()
            model(x.float()).square().mean().backward()
            optimizer.step()
        bits.append(model(x.float()).detach())
        needed += optimizer.gamma_cache.needs_exponents.values()
    assert needed == [False, True]
    return found, bits


def test_a_rescaled_copy_takes_the_same_steps():
    for found, bits in run_on_ranks(train_rescaled, 2):
        for name, (plain, rescaled) in found.items():
            assert (plain - rescaled).abs().max() <= 1e-9 * plain.abs().max(), name
        assert torch.equal(*bits)
