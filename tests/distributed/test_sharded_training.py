"""Models whose parameters are sharded are trained as one process trains them whole: losses and weights, by
FSDP2, tensor parallel, and both on one mesh. Every second step clips gradients by the path norm.

In fp32 to 1e-6, weights being below 1 and losses about 1; in fp64 to 1e-9, which BalancedMuon needs, whose
iteration magnifies rounding. ``python -m support.agreement`` prints the differences of all after 50 steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pathsgd.sharding import local_part, shards_of
from support import networks
from support.ranks import run_on_ranks
from support.sharded import (
    Convolutional,
    Decoder,
    Feedforward,
    Mlp,
    make,
    parallelize,
    shard,
    traced,
    train,
)

FP32, FP64 = torch.float32, torch.float64
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
    (Feedforward, "BalancedMuon", FP64, 3), (Feedforward, "PathSGD", FP32, 20),
    (Feedforward, "AdamW on paths", FP32, 3), (Decoder, "PathSGD", FP32, 3),
]  # fmt: skip
ON_A_MESH = [
    (Feedforward, "BalancedMuon", FP64, 3), (Feedforward, "PathSGD", FP32, 20),
    (Feedforward, "Adagrad on paths", FP32, 3), (Decoder, "PathSGD", FP64, 2),
]  # fmt: skip


def prepare():
    """Traced once for all ranks."""
    for kind in (Mlp, Convolutional, networks.Transformer, Feedforward, Decoder):
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
    """fully_shard over one axis, tensor parallel over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = fully_shard(parallelize(make(kind, dtype), mesh["tensor"]), mesh=mesh["data"])
    check_parts(model)
    rank = mesh.get_local_rank("data")
    return train(model, kind, name, range(rank, rank + 1), steps, dtype)


def check_parts(model):
    """What is taken for this rank's part is that."""
    for p in model.parameters():
        part = p.full_tensor()
        for cut in shards_of(p):
            part = part.narrow(cut.dim, cut.start, cut.length)
        assert torch.equal(part, local_part(p))


def fully_sharded_on_two():
    return [train_fully_sharded(*case) for case in FULLY_SHARDED_ON_TWO]


def fully_sharded_on_four():
    return [train_fully_sharded(*case) for case in FULLY_SHARDED_ON_FOUR]


def tensor_parallel():
    return [train_tensor_parallel(*case) for case in TENSOR_PARALLEL]


def on_a_mesh():
    return [train_on_a_mesh(*case) for case in ON_A_MESH]


def assert_ranks_train_one_model(ranks, cases, shares):
    """Weights are the same on all ranks, to the last bit, and those of one process that sees the batches of
    ``shares`` ranks; so are losses."""
    for k, case in enumerate(cases):
        kind, name, dtype, steps = case
        losses, weights = train(make(kind, dtype), kind, name, range(shares), steps, dtype)
        for rank, found in enumerate(ranks):
            own_losses, own = found[k]
            assert all(map(torch.equal, own, ranks[0][k][1])), case
            share = rank * shares // len(ranks)
            assert (own_losses[:, 0] - losses[:, -1 - share]).abs().max() <= WITHIN[dtype], case
        for a, b in zip(own, weights, strict=True):
            assert (a - b).abs().max() <= WITHIN[dtype], case


def test_fully_sharded_on_two_ranks():
    assert_ranks_train_one_model(run_on_ranks(fully_sharded_on_two, 2), FULLY_SHARDED_ON_TWO, 2)


def test_fully_sharded_on_four_ranks_of_which_one_holds_nothing():
    assert_ranks_train_one_model(run_on_ranks(fully_sharded_on_four, 4), FULLY_SHARDED_ON_FOUR, 4)


def test_tensor_parallel():
    assert_ranks_train_one_model(run_on_ranks(tensor_parallel, 2), TENSOR_PARALLEL, 1)


def test_both_on_a_mesh():
    assert_ranks_train_one_model(run_on_ranks(on_a_mesh, 4), ON_A_MESH, 2)
