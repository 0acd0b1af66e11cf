"""Copies of a model on several ranks (DistributedDataParallel) stay the same to the last bit, and are what one
process would train. Statistics of batch norms differ between ranks; nothing is sent because of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pathsgd
from pathsgd import PathNormalized, PathSGD
from support.collectives import counted_numbers
from support.ranks import run_on_ranks

STEPS = 6
EXAMPLE = torch.zeros(1, 3, 4, 4)
OPTIMIZERS = {
    "PathSGD": lambda m, g: PathSGD(m, g, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda m, g: PathNormalized(torch.optim.AdamW, m, g, lr=1e-3),
    "Adagrad": lambda m, g: PathNormalized(torch.optim.Adagrad, m, g, lr=1e-3),
}
LONG = {"PathSGD": 50}
"""Steps, if more than usual."""


class Residual(nn.Module):
    """A convolution, a residual block with batch norm, and a stack of linear layers."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv, self.block_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.mlp = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = (x + self.block_norm(self.conv(x))).relu()
        return self.mlp(x.mean((2, 3)))


def make():
    torch.manual_seed(0)
    return Residual()


def batch(step, rank):
    """A rank's data: the scale differs from rank to rank, as statistics then do."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = (1 + 2 * rank) * torch.randn(4, 3, 4, 4, generator=generator) + rank
    return x, torch.randint(5, (4,), generator=generator)


def loss_of(model, step, rank):
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def train(ddp, optimizer, before_step=lambda step: None, steps=STEPS):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(loss_of(ddp, step, dist.get_rank()))
        losses[-1].backward()
        before_step(step)
        optimizer.step()
    return torch.stack(losses).detach()


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


def train_every_optimizer():
    graph, found = pathsgd.trace(make(), EXAMPLE), {}
    for name, optimizer_of in OPTIMIZERS.items():
        model = make()
        ddp = DistributedDataParallel(model)
        if dist.get_world_size() > 2:
            ddp.register_comm_hook(ddp.process_group, add_up_in_order)
        with counted_numbers() as sent:
            losses = train(ddp, optimizer_of(ddp, graph), steps=LONG.get(name, STEPS))
        assert not any(sent.values())
        found[name] = losses, weights(model), [b.clone() for b in model.buffers()]
    return found


def train_in_one_process(optimizer_of, graph, steps, ranks):
    """The same training: gradients are averaged, and buffers are rank 0's."""
    model, losses = make(), []
    optimizer = optimizer_of(model, graph)
    for step in range(steps):
        buffers = copy.deepcopy(dict(model.named_buffers()))
        optimizer.zero_grad()
        for rank in reversed(range(ranks)):
            model.load_state_dict(buffers, strict=False)
            losses.append(loss_of(model, step, rank))
            (losses[-1] / ranks).backward()
        optimizer.step()
    return torch.stack(losses).detach().view(steps, ranks).flip(1), weights(model)


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_are_equal_and_are_what_one_process_trains(world):
    """To the last bit, in fp32, where both add up in the same order."""
    ranks, graph = run_on_ranks(train_every_optimizer, world), pathsgd.trace(make(), EXAMPLE)
    for name, optimizer_of in OPTIMIZERS.items():
        losses, expected = train_in_one_process(optimizer_of, graph, LONG.get(name, STEPS), world)
        for rank, found in enumerate(ranks):
            rank_losses, moved, buffers = found[name]
            assert all(map(torch.equal, moved, expected)), name
            assert torch.equal(rank_losses, losses[:, rank]), name
            assert rank == 0 or not all(map(torch.equal, buffers, ranks[0][name][2]))


def train_in_other_ways():
    """Each of these would drift apart, hang or train something else if it were done carelessly."""
    rank, graph, ends = dist.get_rank(), pathsgd.trace(make(), EXAMPLE), {}

    # The optimizer knows the module alone, before it is wrapped or after.
    optimizer = PathSGD(model := make(), graph, lr=1e-3)
    train(DistributedDataParallel(model), optimizer)
    ends["wrapped later"] = weights(model)
    ddp = DistributedDataParallel(torch.compile(model := make(), backend="eager"), broadcast_buffers=False)
    train(ddp, PathSGD(model, graph, lr=1e-3))
    ends["buffers of its own"] = weights(model)

    # One rank looks at gamma and changes its statistics.
    ddp = DistributedDataParallel(model := make())
    optimizer = PathSGD(ddp, graph, lr=1e-3)

    def look(step):
        if rank == 0:
            optimizer.gammas.measure(2)
            model(batch(step, 7)[0])  # in training mode

    train(ddp, optimizer, look)
    ends["looked at"] = weights(model)

    # Clipping, which needs gamma before the step does; and steps that GradScaler skips after it.
    train(ddp, optimizer, lambda step: pathsgd.clip_path_grad_norm_(optimizer, 0.1))
    ends["clipped"] = weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, step, rank)
        scaler.scale(loss * (torch.inf if step == 2 else 1)).backward()
        scaler.unscale_(optimizer)
        pathsgd.clip_path_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
    ends["scaled"] = weights(model)

    # A copy goes on as what it was copied from, inside a wrapper of its own.
    for name, other in (("copied", copy.deepcopy(optimizer)), ("pickled", pickle.loads(pickle.dumps(optimizer)))):
        copied = other.gammas.tensors.model
        train(DistributedDataParallel(copied), other)
        ends[name] = weights(copied)
    train(ddp, optimizer)
    assert all(map(torch.equal, ends["copied"], model.parameters()))

    # Frozen statistics; and ranks that have more batches than others.
    ddp = DistributedDataParallel(model := make().eval())
    train(ddp, PathSGD(ddp, graph, lr=1e-3))
    ends["frozen"] = weights(model)
    ddp = DistributedDataParallel(model := make())
    with ddp.join():
        train(ddp, PathSGD(ddp, graph, lr=1e-3), steps=STEPS + rank)
    ends["uneven"] = weights(model)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(make())
    return ends, pathsgd.trace(synchronised, EXAMPLE).nodes == graph.nodes


def test_other_ways_of_training():
    (first, is_same), (second, _) = run_on_ranks(train_in_other_ways, 2)
    for name, moved in first.items():
        assert all(map(torch.equal, moved, second[name])), name
    assert is_same  # the graph with SyncBatchNorm
