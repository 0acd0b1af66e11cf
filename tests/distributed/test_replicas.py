"""Copies of a model on several ranks (DistributedDataParallel) stay the same to the last bit, and are what
one process would train. Statistics of batch norms differ between ranks; nothing is sent because of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pathsgd
from pathsgd.muon.round import EVERY
from support.collectives import counted_numbers
from support.ranks import run_on_ranks
from support.sharded import (
    OPTIMIZERS,
    Convolutional,
    Mlp,
    are_equal,
    batch,
    loss_of,
    make_rescaled,
    step_on,
    traced,
    train,
    whole_parameters,
)

FP32, FP64 = torch.float32, torch.float64
NAMES = ("BalancedMuon", "PathSGD", "AdamW on paths", "Adagrad on paths")
STEPS, KINDS = EVERY + 2, (Mlp, Convolutional)
CASES = [(kind, name, 50 if name == "PathSGD" else STEPS) for kind in KINDS for name in NAMES]


def prepare():
    for kind in KINDS:
        traced(kind)


def make_model(kind, dtype=FP64):
    return make_rescaled(kind, 5, dtype=dtype)


def share():
    """This rank's part of all batches."""
    return range(dist.get_rank(), dist.get_rank() + 1)


def add_up_in_order(group, bucket):
    """A hook of DDP: the gradients of the last rank first. gloo adds up those of four in an order that
    differs from entry to entry, and rounding in another order is all that one process would differ by."""
    ranks = dist.get_world_size(group)
    parts = [torch.empty_like(bucket.buffer()) for _ in range(ranks)]
    done = dist.all_gather(parts, bucket.buffer() / ranks, group=group, async_op=True).get_future()

    def add(_):
        total = parts[-1]
        for part in reversed(parts[:-1]):
            total = total + part
        return total

    return done.then(add)


def train_copies():
    ends = []
    for kind, name, steps in CASES:
        ddp = DistributedDataParallel(make_model(kind, FP32))
        if dist.get_world_size() > 2:
            ddp.register_comm_hook(ddp.process_group, add_up_in_order)
        with counted_numbers() as sent:
            losses, weights = train(ddp, kind, name, share(), steps, FP32)
        assert not any(sent.values())
        ends.append((losses, weights, [b.clone() for b in ddp.buffers()]))
    return ends


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_are_equal_and_are_what_one_process_trains(world):
    """The bound is the last bit, in fp32, where both add up in the same order."""
    ranks = run_on_ranks(train_copies, world)
    for k, case in enumerate(CASES):
        kind, name, steps = case
        losses, expected = train(make_model(kind, FP32), kind, name, range(world), steps, FP32)
        for rank, ends in enumerate(ranks):
            rank_losses, weights, buffers = ends[k]
            assert are_equal(weights, expected), case
            assert torch.equal(rank_losses[:, 0], losses[:, -1 - rank]), case
            assert not buffers or rank == 0 or not are_equal(buffers, ranks[0][k][2])


def train_in_other_ways(name):
    """Each of these would drift apart, hang or train something else if it were done carelessly."""
    kind, rank, graph, ends = Convolutional, dist.get_rank(), traced(Convolutional), {}

    def go_on(model, optimizer, before_step=lambda step: None, steps=STEPS):
        for step in range(steps):
            before_step(step)
            step_on(model, optimizer, kind, step, share())
        return whole_parameters(model)

    # The optimizer knows the module alone, before it is wrapped or after; one traces the first batch. Ranks
    # have weights of their own until DDP sends those of rank 0.
    torch.manual_seed(rank)
    model = kind().double() if rank else make_model(kind)
    optimizer = OPTIMIZERS[name](model, graph)
    ends["wrapped later"] = go_on(DistributedDataParallel(model), optimizer)
    optimizer = OPTIMIZERS[name](model := make_model(kind), None)
    ends["traced later"] = go_on(DistributedDataParallel(model), optimizer)
    ddp = DistributedDataParallel(torch.compile(make_model(kind), backend="eager"), broadcast_buffers=False)
    ends["buffers of its own"] = go_on(ddp, OPTIMIZERS[name](ddp, graph))

    # One rank looks at gamma and changes its statistics.
    ddp = DistributedDataParallel(model := make_model(kind))
    optimizer = OPTIMIZERS[name](ddp, graph)

    def look(step):
        if rank == 0:
            pathsgd.gammas(model, graph)
            model(batch(kind, step, 7, FP64)[0])  # in training mode

    ends["looked at"] = go_on(ddp, optimizer, look)

    # Steps that GradScaler skips.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, kind, step, rank, FP64)
        scaler.scale(loss * (torch.inf if step == 2 else 1)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    ends["scaled"] = whole_parameters(model)

    # A copy goes on as what it was copied from, inside a wrapper of its own.
    copies = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    end = go_on(ddp, optimizer)
    assert all(are_equal(go_on(DistributedDataParallel(other), it), end) for other, it in copies)

    # Frozen statistics; and ranks that have more batches than others.
    ddp = DistributedDataParallel(make_model(kind).eval())
    ends["frozen"] = go_on(ddp, OPTIMIZERS[name](ddp, graph))
    ddp = DistributedDataParallel(make_model(kind))
    with ddp.join():
        go_on(ddp, OPTIMIZERS[name](ddp, graph), steps=STEPS + 2 * rank)
    ends["uneven"] = whole_parameters(ddp)
    return ends


@pytest.mark.parametrize("name", ["PathSGD", "BalancedMuon"])
def test_other_ways_of_training(name):
    first, second = run_on_ranks(train_in_other_ways, 2, name)
    for way, weights in first.items():
        assert are_equal(weights, second[way]), way
    model = make_model(Convolutional)
    optimizer = OPTIMIZERS[name](model, traced(Convolutional))
    for ways, begin, end in ((["wrapped later", "traced later"], 0, STEPS), (["uneven"], STEPS, STEPS + 2)):
        for step in range(begin, end):
            step_on(model, optimizer, Convolutional, step, range(step >= STEPS, 2), count=2)
        for way in ways:
            for a, b in zip(first[way], whole_parameters(model), strict=True):
                assert (a - b).abs().max() <= 1e-9, way


def test_synchronised_batch_norm_has_the_same_graph():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_model(Convolutional, FP32))
    assert pathsgd.trace(model, torch.zeros(Convolutional.example)).nodes == traced(Convolutional).nodes
