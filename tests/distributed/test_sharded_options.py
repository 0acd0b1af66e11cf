"""Options of ``fully_shard``: computing in bf16, sharded parameters in bf16, offloading, copies of shards."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from support.ranks import run_on_ranks
from support.sharded import OPTIMIZERS, Mlp, loss_of, make, traced, train, whole_parameters

FP32, BF16 = torch.float32, torch.bfloat16
OPTIMIZERS_HERE = ("BalancedMuon", "PathSGD", "AdamW on paths")
STEPS = 5


def prepare():
    traced(Mlp)


def train_with(name, dtype=torch.float64, steps=2, **options):
    rank = dist.get_rank()
    return train(fully_shard(make(Mlp, dtype), **options), Mlp, name, range(rank, rank + 1), steps, dtype)[1]


# Precision


def train_in_bf16(name):
    """The weights stay in fp32, and gradients are added up in it."""
    model = make(Mlp, FP32)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32))
    optimizer = OPTIMIZERS[name](model, traced(Mlp))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, Mlp, step, dist.get_rank(), FP32).backward()
        optimizer.step()
    assert all(p.dtype is FP32 for p in model.parameters())
    return whole_parameters(model)


def train_one_process_in_bf16(name, ranks):
    """The gradients are those of a copy in bf16."""
    model = make(Mlp, FP32)
    optimizer = OPTIMIZERS[name](model, traced(Mlp))
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in reversed(range(ranks)):
            computing = copy.deepcopy(model).to(BF16)
            computing.zero_grad()
            computing.register_forward_pre_hook(lambda _, x: (x[0].to(BF16),))
            computing.register_forward_hook(lambda _, x, y: y.to(FP32))
            loss_of(computing, Mlp, step, rank, FP32).backward()
            for p, q in zip(model.parameters(), computing.parameters(), strict=True):
                share = q.grad.to(FP32) / ranks
                p.grad = share if p.grad is None else p.grad + share
        optimizer.step()
    return whole_parameters(model)


def compute_in_bf16():
    return {name: train_in_bf16(name) for name in OPTIMIZERS_HERE}


def keep_parameters_in_bf16():
    return {name: train_with(name, BF16, STEPS) for name in OPTIMIZERS_HERE}


def gap(found, expected):
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def test_mixed_precision_policy():
    """Gradients are the same to the last bit, so that the bound is that of fp32: 1e-7 seen. (Rounding to bf16
    could tip over a weight that lies between two numbers by less than that, by 4e-3 of it; none does.)"""
    ranks = run_on_ranks(compute_in_bf16, 2)
    for name in OPTIMIZERS_HERE:
        expected = train_one_process_in_bf16(name, 2)
        for found in ranks:
            assert gap(found[name], expected) <= 1e-6, name


def test_parameters_in_bf16():
    """To a unit in the last place of the largest weight; to the last bit was seen."""
    ranks = run_on_ranks(keep_parameters_in_bf16, 2)
    for name in OPTIMIZERS_HERE:
        expected = train(make(Mlp, BF16), Mlp, name, range(2), STEPS, BF16)[1]
        assert gap(expected, whole_parameters(make(Mlp, BF16))) > 0.005, name
        for found in ranks:
            for a, b in zip(found[name], expected, strict=True):
                assert (a - b).abs().max() <= 2**-8 * b.abs().max(), name


# Places


def train_on_four():
    """In the memory of the CPU; and on a mesh of copies of shards (HSDP)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"mesh": mesh}
    return {name: [train_with(name, **own) for own in options] for name in OPTIMIZERS_HERE}


def test_offloading_and_copies_of_shards():
    for found in run_on_ranks(train_on_four, 4):
        for name, (plain, offloaded, copies) in found.items():
            assert all(map(torch.equal, plain, offloaded)), name
            assert gap(copies, plain) <= 1e-9, name
