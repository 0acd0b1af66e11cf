"""balance and BalancedMuon on ranks: sharded models are balanced and trained as one process does with whole
ones, copies of a model as one process does with all batches.

Of four ranks one holds nothing of five rows, see ``support.sharded``. In fp64, balanced weights to 1e-12 of
each (1e-15 seen) and trained ones to 1e-9 (1e-13 seen), as Muon's iteration magnifies rounding.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pathsgd
from pathsgd import BalancedMuon, PathError
from pathsgd.muon.upkeep import EVERY
from support import networks
from support.collectives import counted_numbers
from support.ranks import run_on_ranks
from support.sharded import (
    Convolutional,
    Decoder,
    Mlp,
    batch,
    loss_of,
    make,
    parallelize,
    shard,
    step_on,
    traced,
    whole_parameters,
)

STEPS = EVERY + 2
FP64 = torch.float64


def prepare():
    for kind in (Mlp, Convolutional, Decoder, networks.UNet, networks.Transformer):
        traced(kind)


def make_unbalanced(kind, powers_of_two=False, dtype=FP64):
    model = make(kind, dtype)
    generator = torch.Generator().manual_seed(1)
    pathsgd.unbalance(
        model, traced(kind), units=40, sigma=2.0, powers_of_two=powers_of_two, generator=generator
    )
    return model


def spread(model, way):
    """The model on all ranks."""
    if way == "fully sharded":
        return fully_shard(model)
    if way == "block by block":
        return shard(model, blocks=True)
    if way == "by columns":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"2": ColwiseParallel(use_local_output=False), "4": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    if way == "copies of shards":
        return fully_shard(model, mesh=mesh)
    parallelize(model, mesh["tensor"])
    return fully_shard(model, mesh=mesh["data"]) if way == "both" else model


def gap(found, expected, least=0.0):
    """The largest difference, relative to each entry, or to ``least`` if that is more."""
    pairs = zip(found, expected, strict=True)
    return max(float(((a - b).abs() / b.abs().clamp(min=least or 1e-300)).max()) for a, b in pairs)


def are_equal(found, expected):
    return all(map(torch.equal, found, expected))


# balance

BALANCED = [
    (Mlp, "fully sharded", 2, 2), (Mlp, "fully sharded", 1, 3), (Mlp, "by columns", 2, 2),
    (Mlp, "copies of shards", 2, 2), (Convolutional, "block by block", 2, 2),
    (Convolutional, "fully sharded", 2, 1), (networks.UNet, "fully sharded", 2, 2),
    (networks.Transformer, "fully sharded", 2, 2), (Decoder, "block by block", 1, 1),
    (Decoder, "tensor parallel", 2, 2), (Decoder, "both", 2, 2), (Decoder, "both", 2, 1),
]  # fmt: skip


def compare_balances(kind, way, p, q):
    """(relative gaps of weights, of mu and of outputs; the weights)."""
    whole, x = make_unbalanced(kind), batch(kind, 0, 0, FP64)[0]
    model = spread(copy.deepcopy(whole), way)
    with torch.no_grad():
        before = whole(x)
        expected = pathsgd.balance(whole, traced(kind), p, q)
        mu = pathsgd.balance(model, traced(kind), p, q)
        own = whole_parameters(model)
        output = model(x)
    gaps = {
        "weights": gap(own, whole_parameters(whole)),
        "mu": abs(mu / expected - 1),
        "outputs": float((output - before).abs().max() / before.abs().max()),
    }
    return gaps, own


def make_partly_dead():
    """Zeros into a unit, out of another, and all of the last layer: what is left is brought to a norm."""
    model = make_unbalanced(Mlp)
    with torch.no_grad():
        for rows in (model[0].weight[1], model[0].bias[1:2], model[2].weight[:, 3], *model[4].parameters()):
            rows.zero_()
        for p in model[0].parameters():
            p.zero_() if p.dim() == 1 else p[2:].zero_()
    return model


def balance_what_is_dead():
    found = []
    for way in ("fully sharded", "by columns"):
        whole = make_partly_dead()
        model = spread(copy.deepcopy(whole), way)
        for own in (whole, model):
            pathsgd.balance(own, traced(Mlp))
        found.append(gap(whole_parameters(model), whole_parameters(whole)))
    return found


def balance_in_bf16():
    """By powers of two alone: to the last bit."""
    whole = make_unbalanced(Mlp, dtype=torch.bfloat16)
    start = whole_parameters(whole)
    model = fully_shard(copy.deepcopy(whole))
    for own in (whole, model):
        pathsgd.balance(own, traced(Mlp))
    return are_equal(whole_parameters(model), whole_parameters(whole)), are_equal(start, whole.parameters())


def refuse_what_one_rank_holds():
    """A nan in the first row is an error on all ranks; nobody waits."""
    model = make(Mlp)
    model[2].weight.data[0, 0] = torch.nan
    fully_shard(model)
    messages = []
    for attempt in (pathsgd.balance, BalancedMuon):
        with pytest.raises(PathError) as refused:
            attempt(model, traced(Mlp))
        messages.append(str(refused.value))
    return messages


def balance_everything():
    example = fully_shard(make_unbalanced(Mlp))
    pathsgd.balance(example, batch(Mlp, 0, 0, FP64)[0])  # traced as it is
    return {
        "balanced": [compare_balances(*case) for case in BALANCED],
        "traced sharded": whole_parameters(example),
        "dead": balance_what_is_dead(),
        "bf16": balance_in_bf16(),
        "refused": refuse_what_one_rank_holds(),
    }


def test_a_sharded_model_is_balanced_as_the_whole_one():
    ranks = run_on_ranks(balance_everything, 4)
    for found in ranks:
        for k, (case, (gaps, own)) in enumerate(zip(BALANCED, found["balanced"], strict=True)):
            assert gaps["weights"] <= 1e-12, case
            assert gaps["mu"] <= 1e-12, case
            assert gaps["outputs"] <= 1e-9, case
            assert are_equal(own, ranks[0]["balanced"][k][1]), case
        assert are_equal(found["traced sharded"], found["balanced"][0][1])
        assert max(found["dead"]) <= 1e-12
        assert found["bf16"] == (True, False)
        assert all("'2.weight' holds nan" in message for message in found["refused"])
        assert len(found["refused"]) == 2


# BalancedMuon

TRAINED = [
    (Mlp, "fully sharded"), (Convolutional, "block by block"), (Decoder, "tensor parallel"),
    (Decoder, "both"),
]  # fmt: skip


def train(model, optimizer, kind, steps, ranks=range(1)):
    """All see the batches of ``ranks``. The weights afterwards."""
    for step in steps:
        step_on(model, optimizer, kind, step, ranks)
    return whole_parameters(model)


def train_from(model, kind, steps=range(STEPS)):
    return train(model, BalancedMuon(model, traced(kind), weight_decay=0.1), kind, steps)


def train_sharded(kind, way):
    """The gaps between the whole model and the sharded one, and between the latter from different starts."""
    found = train_from(spread(make(kind), way), kind)
    rescaled = train_from(spread(make_unbalanced(kind), way), kind)
    expected = train_from(make(kind), kind)
    return {"whole": gap(found, expected, 1.0), "unbalanced": gap(rescaled, found, 1.0)}, found


def train_everything():
    return [train_sharded(*case) for case in TRAINED]


def test_a_sharded_model_is_trained_as_the_whole_one():
    ranks = run_on_ranks(train_everything, 4)
    for found in ranks:
        for k, (case, (gaps, own)) in enumerate(zip(TRAINED, found, strict=True)):
            print(case, gaps)
            assert are_equal(own, ranks[0][k][1]), case
