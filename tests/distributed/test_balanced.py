"""balance and BalancedMuon on ranks: sharded models are balanced and trained as one process does with whole
ones.

Of four ranks one holds nothing of five rows, see ``support.sharded``. In fp64, balanced weights to 1e-12 of
each (1e-15 seen) and trained ones to 1e-9 (1e-13 seen), as Muon's iteration magnifies rounding.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pathsgd
from pathsgd import BalancedMuon, PathError
from pathsgd.balancing import class_edges
from pathsgd.muon.round import EVERY
from support import networks
from support.ranks import run_on_ranks
from support.sharded import (
    Convolutional,
    Decoder,
    Mlp,
    are_equal,
    batch,
    make,
    make_rescaled,
    parallelize,
    shard,
    step_on,
    traced,
    whole_parameters,
)

STEPS = EVERY + 2
FP64 = torch.float64
BITS = 12
"""Models that are not balanced have units rescaled by up to 2 to this power."""


class Narrow(nn.Sequential):
    """A model of which the last of four ranks holds nothing at all."""

    example = (6, 6)

    def __init__(self):
        super().__init__(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 3))


def prepare():
    for kind in (Mlp, Narrow, Convolutional, Decoder, networks.Transformer):
        traced(kind)


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


def gap(tensors, expected, least=0.0):
    """The largest difference, relative to each entry, or to ``least`` if that is more."""
    pairs = zip(tensors, expected, strict=True)
    return max(float(((a - b).abs() / b.abs().clamp(min=least or 1e-300)).max()) for a, b in pairs)


# balance

BALANCED = [
    (Mlp, "fully sharded", 2, 2), (Mlp, "fully sharded", 1, 3), (Mlp, "by columns", 2, 2),
    (Mlp, "copies of shards", 2, 2), (Convolutional, "block by block", 2, 2),
    (Convolutional, "fully sharded", 2, 1), (networks.Transformer, "fully sharded", 2, 2),
    (Decoder, "tensor parallel", 1, 1), (Decoder, "both", 2, 2),
]  # fmt: skip


def compare_balances(kind, way, p, q):
    """(relative gaps of weights, of mu and of outputs; the weights)."""
    whole, x = make_rescaled(kind, BITS), batch(kind, 0, 0, FP64)[0]
    model = spread(copy.deepcopy(whole), way)
    with torch.no_grad():
        before = whole(x)
        expected = pathsgd.balance(whole, traced(kind), p, q)
        mu = pathsgd.balance(model, traced(kind), p, q)
        weights = whole_parameters(model)
        output = model(x)
    gaps = {
        "weights": gap(weights, whole_parameters(whole)),
        "mu": abs(mu / expected - 1),
        "outputs": float((output - before).abs().max() / before.abs().max()),
    }
    return gaps, weights


def make_partly_dead():
    """Zeros into a unit, out of another, and all of the last layer: what is left is brought to a norm."""
    model = make_rescaled(Mlp, BITS)
    with torch.no_grad():
        for rows in (model[0].weight[1], model[0].bias[1:2], model[2].weight[:, 3], *model[4].parameters()):
            rows.zero_()
        for p in model[0].parameters():
            p.zero_() if p.dim() == 1 else p[2:].zero_()
    return model


def balance_what_is_dead():
    gaps = []
    for way in ("fully sharded", "by columns"):
        whole = make_partly_dead()
        model = spread(copy.deepcopy(whole), way)
        for each in (whole, model):
            pathsgd.balance(each, traced(Mlp))
        gaps.append(gap(whole_parameters(model), whole_parameters(whole)))
    return gaps


def balance_in_bf16():
    """Balances by powers of two alone: to the last bit."""
    whole = make_rescaled(Mlp, BITS, dtype=torch.bfloat16)
    start = whole_parameters(whole)
    model = fully_shard(copy.deepcopy(whole))
    for each in (whole, model):
        pathsgd.balance(each, traced(Mlp))
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
    """Balances most as they would be with large layers, whose matrices stay where they are."""
    listed, few = class_edges.SMALL, [case for case in BALANCED if case[1] in ("by columns", "both")]
    class_edges.SMALL = 0
    balanced, dead = [compare_balances(*case) for case in BALANCED], balance_what_is_dead()
    example = fully_shard(make_rescaled(Mlp, BITS))
    pathsgd.balance(example, batch(Mlp, 0, 0, FP64)[0])  # traced as it is
    class_edges.SMALL = listed
    return {
        "balanced": balanced,
        "balanced in lists": [compare_balances(*case) for case in few],
        "traced sharded": whole_parameters(example),
        "dead": dead + balance_what_is_dead(),
        "bf16": balance_in_bf16(),
        "refused": refuse_what_one_rank_holds(),
    }


def test_a_sharded_model_is_balanced_as_the_whole_one():
    ranks = run_on_ranks(balance_everything, 4)
    for results in ranks:
        for way in ("balanced", "balanced in lists"):
            for k, (gaps, weights) in enumerate(results[way]):
                assert gaps["weights"] <= 1e-12, (way, k, gaps)
                assert gaps["mu"] <= 1e-12, (way, k, gaps)
                assert gaps["outputs"] <= 1e-9, (way, k, gaps)
                assert are_equal(weights, ranks[0][way][k][1]), (way, k)
        assert are_equal(results["traced sharded"], results["balanced"][0][1])
        assert max(results["dead"]) <= 1e-12
        assert results["bf16"] == (True, False)
        assert all("'2.weight' holds nan" in message for message in results["refused"])
        assert len(results["refused"]) == 2


# BalancedMuon

TRAINED = [
    (Mlp, "fully sharded"), (Convolutional, "block by block"), (Decoder, "both"),
]  # fmt: skip


def train(model, optimizer, kind, steps):
    """Returns the weights afterwards. All ranks see the same batches."""
    for step in steps:
        step_on(model, optimizer, kind, step, range(1))
    return whole_parameters(model)


def train_from(model, kind, *example):
    return train(model, BalancedMuon(model, *example, weight_decay=0.1), kind, range(STEPS))


def train_sharded(kind, way):
    """All ranks see the same batches. The gaps to the whole model, and between starts; the weights."""
    weights = train_from(spread(make(kind), way), kind, traced(kind))
    # Some are traced from the first batch, when there are gradients already.
    example = () if kind is Convolutional or way == "tensor parallel" else (traced(kind),)
    rescaled = train_from(spread(make_rescaled(kind, BITS), way), kind, *example)
    expected = train_from(make(kind), kind, traced(kind))
    return {"whole": gap(weights, expected, 1.0), "unbalanced": gap(rescaled, weights, 1.0)}, weights


def rescale_in_mid_training():
    """A rescaling by others, which is undone for whole parameters, is balanced for sharded ones: as a balance
    of the same weights would be. (gap to that, gap to no rescaling.)

    Weights lag behind their balance a little, which is the difference between the two.
    """

    def rescale(model, _):
        with torch.no_grad():
            for p in model[0].parameters():
                p.mul_(100.0)
            model[2].weight.div_(100.0)

    ends = []
    for write in (rescale, lambda _, optimizer: optimizer.refresh(), lambda *_: None):
        model = fully_shard(make(Mlp))
        optimizer = BalancedMuon(model, traced(Mlp))
        train(model, optimizer, Mlp, range(5))
        write(model, optimizer)
        ends.append(train(model, optimizer, Mlp, range(5, STEPS)))
    return gap(ends[0], ends[1], 1.0), gap(ends[0], ends[2], 1.0)


def balance_in_mid_training():
    """All ranks notice that weights were written, also one that holds nothing: else some would wait."""
    model = fully_shard(make(Narrow))
    optimizer = BalancedMuon(model, traced(Narrow))
    train(model, optimizer, Narrow, range(5))
    pathsgd.balance(model, traced(Narrow))
    return train(model, optimizer, Narrow, range(5, 7))


def train_everything():
    return {
        "trained": [train_sharded(*case) for case in TRAINED],
        "balanced": balance_in_mid_training(),
    }


def test_a_sharded_model_is_trained_as_the_whole_one():
    ranks = run_on_ranks(train_everything, 4)
    for results in ranks:
        for k, (case, (gaps, weights)) in enumerate(zip(TRAINED, results["trained"], strict=True)):
            assert gaps["whole"] <= 1e-9, case
            assert gaps["unbalanced"] <= 1e-9, case
            assert are_equal(weights, ranks[0]["trained"][k][1]), case
        assert are_equal(results["balanced"], ranks[0]["balanced"])


def test_a_rescaling_in_mid_training_is_balanced():
    for to_balanced, to_none in run_on_ranks(rescale_in_mid_training, 2):
        assert to_balanced <= 1e-9
        assert 1e-9 < to_none < 0.1
