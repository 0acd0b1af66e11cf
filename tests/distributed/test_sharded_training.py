"""Models whose parameters are sharded are trained as one process trains them whole: losses and weights, by
FSDP2, tensor parallel, and both on one mesh. Every second step clips gradients by the path norm.

In fp32 to 1e-6, weights being below 1 and losses about 1; in fp64 to 1e-9, which BalancedMuon needs, whose
iteration magnifies rounding. ``python -m support.agreement`` prints the differences of all after 50 steps.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from pathsgd.sharding import local_part, shards_of
from support import networks
from support.ranks import run_on_ranks
from support.sharded import (
    OPTIMIZERS,
    Convolutional,
    Decoder,
    Mlp,
    are_equal,
    loss_of,
    make,
    parallelize,
    shard,
    traced,
    train,
    whole_parameters,
)

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
WITHIN = {FP32: 1e-6, FP64: 1e-9}

FULLY_SHARDED_ON_TWO = [
    (Mlp, "BalancedMuon", FP64, 50), (Mlp, "PathSGD", FP32, 50), (Mlp, "AdamW on paths", FP32, 50),
    (Mlp, "Adagrad on paths", FP32, 10), (Mlp, "PathSGD, p=1", FP32, 3),
    (Convolutional, "BalancedMuon", FP64, 3), (Convolutional, "PathSGD", FP32, 3),
    (Convolutional, "AdamW on paths", FP64, 3), (networks.Transformer, "BalancedMuon", FP64, 2),
    (networks.Transformer, "PathSGD", FP64, 2),
]  # fmt: skip
FULLY_SHARDED_ON_FOUR = [
    (Mlp, "BalancedMuon", FP64, 20), (Mlp, "PathSGD", FP32, 3), (Mlp, "AdamW on paths", FP32, 3),
]  # fmt: skip
TENSOR_PARALLEL = [
    (Decoder, "BalancedMuon", FP64, 3), (Decoder, "PathSGD", FP32, 20), (Decoder, "AdamW on paths", FP32, 3),
]  # fmt: skip
ON_A_MESH = [
    (Decoder, "BalancedMuon", FP64, 3), (Decoder, "PathSGD", FP32, 20), (Decoder, "Adagrad on paths", FP32, 3)
]  # fmt: skip


def prepare():
    """Traced once for all ranks."""
    for kind in (Mlp, Convolutional, networks.Transformer, Decoder):
        traced(kind)


def train_fully_sharded(kind, name, dtype, steps):
    rank = dist.get_rank()
    model = shard(make(kind, dtype), blocks=kind is not Mlp)
    return train(model, kind, name, range(rank, rank + 1), steps, dtype)


def train_tensor_parallel(kind, name, dtype, steps):
    """All ranks see the same batch."""
    model = parallelize(make(kind, dtype), init_device_mesh("cpu", (dist.get_world_size(),)))
    return train(model, kind, name, range(1), steps, dtype)


def train_on_a_mesh(kind, name, dtype, steps):
    """Trains with fully_shard over one axis and tensor parallel over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = fully_shard(parallelize(make(kind, dtype), mesh["tensor"]), mesh=mesh["data"])
    check_parts(model)
    rank = mesh.get_local_rank("data")
    return train(model, kind, name, range(rank, rank + 1), steps, dtype)


def check_parts(model):
    """Checks that what is taken for this rank's part is that."""
    for p in model.parameters():
        part = p.full_tensor()
        for cut in shards_of(p):
            part = part.narrow(cut.dim, cut.start, cut.length)
        assert torch.equal(part, local_part(p))


WAYS = {
    "FSDP2 on two": (train_fully_sharded, FULLY_SHARDED_ON_TWO),
    "FSDP2 on four": (train_fully_sharded, FULLY_SHARDED_ON_FOUR),
    "tensor parallel": (train_tensor_parallel, TENSOR_PARALLEL),
    "both": (train_on_a_mesh, ON_A_MESH),
}


def train_all(way):
    train_case, cases = WAYS[way]
    return [train_case(*case) for case in cases]


def gap(tensors, others):
    """The largest difference."""
    return max(float((a - b).abs().max()) for a, b in zip(tensors, others, strict=True))


def assert_ranks_train_one_model(way, world, shares):
    """Weights are the same on all ranks, to the last bit, and those of one process that sees the batches of
    ``shares`` ranks; so are losses."""
    ranks = run_on_ranks(train_all, world, way)
    for k, case in enumerate(WAYS[way][1]):
        kind, name, dtype, steps = case
        losses, weights = train(make(kind, dtype), kind, name, range(shares), steps, dtype)
        for rank, results in enumerate(ranks):
            rank_losses, parameters = results[k]
            assert are_equal(parameters, ranks[0][k][1]), case
            share = rank * shares // len(ranks)
            assert gap([rank_losses[:, 0]], [losses[:, -1 - share]]) <= WITHIN[dtype], case
        assert gap(parameters, weights) <= WITHIN[dtype], case


def test_fully_sharded_on_two_ranks():
    assert_ranks_train_one_model("FSDP2 on two", 2, 2)


def test_fully_sharded_on_four_ranks_of_which_one_holds_nothing():
    assert_ranks_train_one_model("FSDP2 on four", 4, 4)


def test_tensor_parallel():
    assert_ranks_train_one_model("tensor parallel", 2, 1)


def test_both_on_a_mesh():
    assert_ranks_train_one_model("both", 4, 2)


# Options of fully_shard

NAMES = ("BalancedMuon", "PathSGD", "AdamW on paths")
STEPS = 5


def train_with(name, dtype=torch.float64, steps=2, **options):
    rank = dist.get_rank()
    return train(fully_shard(make(Mlp, dtype), **options), Mlp, name, range(rank, rank + 1), steps, dtype)[1]


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
    return {name: train_in_bf16(name) for name in NAMES}


def keep_parameters_in_bf16():
    return {name: train_with(name, BF16, STEPS) for name in NAMES}


def test_mixed_precision_policy():
    """Gradients are the same to the last bit, so that the bound is that of fp32: 1e-7 seen. (Rounding to bf16
    could tip over a weight that lies between two numbers by less than that, by 4e-3 of it; none does.)"""
    ranks = run_on_ranks(compute_in_bf16, 2)
    for name in NAMES:
        expected = train_one_process_in_bf16(name, 2)
        for results in ranks:
            assert gap(results[name], expected) <= 1e-6, name


def test_parameters_in_bf16():
    """The bound is a unit in the last place of the largest weight; to the last bit was seen."""
    ranks = run_on_ranks(keep_parameters_in_bf16, 2)
    for name in NAMES:
        expected = train(make(Mlp, BF16), Mlp, name, range(2), STEPS, BF16)[1]
        assert gap(expected, whole_parameters(make(Mlp, BF16))) > 0.005, name
        for results in ranks:
            for a, b in zip(results[name], expected, strict=True):
                assert (a - b).abs().max() <= 2**-8 * b.abs().max(), name


def train_on_four():
    """Trains in the memory of the CPU; and on a mesh of copies of shards (HSDP)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"mesh": mesh}
    return {name: [train_with(name, **chosen) for chosen in options] for name in NAMES}


def test_offloading_and_copies_of_shards():
    for results in run_on_ranks(train_on_four, 4):
        for name, (plain, offloaded, copies) in results.items():
            assert are_equal(plain, offloaded), name
            assert gap(copies, plain) <= 1e-9, name
