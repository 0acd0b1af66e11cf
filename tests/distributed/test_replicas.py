"""Copies of a model on several ranks stay the same to the last bit, and are what one process would train."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pathsgd
from pathsgd import PathAdam, PathMuon, PathNormalized, PathSGD
from support.ranks import run_on_ranks

STEPS = 6
WORLD = 2
EXAMPLE = torch.zeros(1, 3, 4, 4)

OPTIMIZERS = {
    "PathSGD": lambda m, g: PathSGD(m, g, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "refresh_every": lambda m, g: PathSGD(m, g, lr=1e-3, refresh_every=3),
    "limited": lambda m, g: PathSGD(m, g, lr=1e-2, max_relative_step=1e-2),
    "AdamW": lambda m, g: PathNormalized(torch.optim.AdamW, m, g, lr=1e-3),
    "PathAdam": lambda m, g: PathAdam(m, g, lr=1e-2),
    "PathMuon": lambda m, g: PathMuon(m, g, lr=1e-2),
}
WITHOUT_STATISTICS = {"PathAdam", "PathMuon"}
LONG = {"PathSGD": 50, "PathAdam": 50, "PathMuon": 50}
"""Steps, if more than usual."""


class Residual(nn.Module):
    """A convolution, a residual block with batch norm, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv, self.block_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = (x + self.block_norm(self.conv(x))).relu()
        return self.head(x.mean((2, 3)))


def make():
    torch.manual_seed(0)
    return Residual()


def batch(step, rank):
    """A rank's own data: the scale differs from rank to rank, as statistics then do."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = (1 + 2 * rank) * torch.randn(4, 3, 4, 4, generator=generator) + rank
    return x, torch.randint(5, (4,), generator=generator)


def loss_of(model, step, rank):
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@contextmanager
def counted_broadcasts():
    """The size and the group of every broadcast that Python code asks for; DDP's own are made elsewhere."""
    original, calls = dist.broadcast, []

    def broadcast(tensor, *args, group=None, **kwargs):
        calls.append((tensor.numel(), group))
        return original(tensor, *args, group=group, **kwargs)

    dist.broadcast = broadcast
    try:
        yield calls
    finally:
        dist.broadcast = original


def train(ddp, optimizer, before_step=lambda step: None, steps=STEPS):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(loss_of(ddp, step, dist.get_rank()))
        losses[-1].backward()
        before_step(step)
        optimizer.step()
    return torch.stack(losses).detach()


def train_every_optimizer():
    graph, found = pathsgd.trace(make(), EXAMPLE), {}
    for name, optimizer_of in OPTIMIZERS.items():
        model = make()
        ddp = DistributedDataParallel(model)
        optimizer = optimizer_of(ddp, graph)
        with counted_broadcasts() as calls:
            losses = train(ddp, optimizer, steps=LONG.get(name, STEPS))
        assert all(group is ddp.process_group for _, group in calls)
        buffers = [b.clone() for b in model.buffers()]
        found[name] = losses, weights(model), buffers, [size for size, _ in calls]
    return found


def train_in_one_process(optimizer_of, graph, steps, ranks=WORLD):
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


def test_replicas_are_equal_and_are_what_one_process_trains():
    """To the last bit, in fp32: a sum of two does not depend on their order."""
    ranks = run_on_ranks(train_every_optimizer, WORLD)
    graph = pathsgd.trace(make(), EXAMPLE)
    statistics = sum(b.numel() for b in make().buffers() if b.dim() == 1)
    for name, optimizer_of in OPTIMIZERS.items():
        steps = LONG.get(name, STEPS)
        losses, expected = train_in_one_process(optimizer_of, graph, steps)
        for rank, found in enumerate(ranks):
            own_losses, moved, _, sizes = found[name]
            assert all(map(torch.equal, moved, expected)), name
            assert torch.equal(own_losses, losses[:, rank]), name
            assert sizes == ([] if name in WITHOUT_STATISTICS else [statistics] * steps), name
        (_, _, buffers, _), (_, _, others, _) = (found[name] for found in ranks)
        assert not all(map(torch.equal, buffers, others))


ON_FOUR = {"PathSGD": 50, "PathAdam": 10}


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


def train_on_four():
    graph, found = pathsgd.trace(make(), EXAMPLE), {}
    for name, steps in ON_FOUR.items():
        ddp = DistributedDataParallel(model := make())
        ddp.register_comm_hook(ddp.process_group, add_up_in_order)
        found[name] = train(ddp, OPTIMIZERS[name](ddp, graph), steps=steps), weights(model)
    return found


def test_four_replicas_are_what_one_process_trains():
    """To the last bit, too, where both add up in the same order."""
    graph, ranks = pathsgd.trace(make(), EXAMPLE), run_on_ranks(train_on_four, 4)
    for name, steps in ON_FOUR.items():
        losses, expected = train_in_one_process(OPTIMIZERS[name], graph, steps, 4)
        for rank, found in enumerate(ranks):
            own_losses, moved = found[name]
            assert all(map(torch.equal, moved, expected)), name
            assert torch.equal(own_losses, losses[:, rank]), name


def train_in_every_way(graph):
    """Each of these would drift apart, hang or train something else if it were done carelessly."""
    rank, found = dist.get_rank(), {}

    def keep(name, model):
        found[name] = weights(model)

    # The optimizer knows the module alone, before it is wrapped or after.
    model = make()
    optimizer = PathSGD(model, graph, lr=1e-3)
    train(DistributedDataParallel(model), optimizer)
    keep("wrapped later", model)
    model = make()
    ddp = DistributedDataParallel(torch.compile(model, backend="eager"), broadcast_buffers=False)
    train(ddp, PathSGD(model, graph, lr=1e-3))
    keep("buffers of its own", model)

    # One rank looks at gamma, counts its batches, or refreshes alone.
    for every in (1, 3):
        model = make()
        ddp = DistributedDataParallel(model)
        optimizer = PathSGD(ddp, graph, lr=1e-3, refresh_every=every)

        def look(step, optimizer=optimizer, model=model):
            if rank == 0:
                optimizer.gamma_cache.gammas(2)
                model(batch(step, 7)[0])  # in training mode: its statistics change

        train(ddp, optimizer, look)
        keep(f"looked at, refresh_every={every}", model)

    # Clipping, which needs gamma before the step does; and steps that GradScaler skips after it.
    model = make()
    ddp = DistributedDataParallel(model)
    optimizer = PathSGD(ddp, graph, lr=1e-3)
    with counted_broadcasts() as calls:
        train(ddp, optimizer, lambda step: pathsgd.clip_path_grad_norm_(optimizer, 0.1))
    assert len(calls) == STEPS
    keep("clipped", model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, step, rank)
        scaler.scale(loss * (torch.inf if step == 2 else 1)).backward()
        scaler.unscale_(optimizer)
        pathsgd.clip_path_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
    keep("scaled", model)

    # A copy goes on as what it was copied from, inside a wrapper of its own.
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        train(DistributedDataParallel(other.gamma_cache.model), other)
        keep("copied", other.gamma_cache.model)
    train(ddp, optimizer)
    assert all(map(torch.equal, found["copied"], model.parameters()))

    # Frozen statistics are taken as they are.
    model = make().eval()
    ddp = DistributedDataParallel(model)
    train(ddp, PathSGD(ddp, graph, lr=1e-3))
    keep("frozen", model)
    return found


def train_apart(graph):
    """Ranks that train models of their own wait for nobody."""
    rank = dist.get_rank()
    with counted_broadcasts() as calls, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = make()
        optimizer = PathSGD(model, graph, lr=1e-3)
        for step in range(2 + rank):  # one rank has more steps
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        messages = [str(w.message) for w in caught if "DistributedDataParallel" in str(w.message)]
        alone = dist.new_group([rank], use_local_synchronization=True)
        model = make()
        ddp = DistributedDataParallel(model, process_group=alone)
        train(ddp, PathSGD(ddp, graph, lr=1e-3))
    return len(calls), messages


def refuse_join(graph):
    ddp = DistributedDataParallel(make())
    optimizer = PathSGD(ddp, graph, lr=1e-3)
    with ddp.join():
        loss_of(ddp, 0, dist.get_rank()).backward()
        with pytest.raises(pathsgd.PathError, match="Join") as refused:
            optimizer.step()
    return str(refused.value)


def train_in_other_ways():
    graph = pathsgd.trace(make(), EXAMPLE)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(make())
    return {
        "replicas": train_in_every_way(graph),
        "apart": train_apart(graph),
        "join": refuse_join(graph),
        "the same graph": pathsgd.trace(synchronised, EXAMPLE).nodes == graph.nodes,
    }


def test_other_ways_of_training():
    first, second = run_on_ranks(train_in_other_ways, WORLD)
    assert first["replicas"].keys() == second["replicas"].keys()
    for name, moved in first["replicas"].items():
        assert all(map(torch.equal, moved, second["replicas"][name])), name
    for found in (first, second):
        broadcasts, messages = found["apart"]
        assert broadcasts == 0
        assert len(messages) == 1
        assert "2 ranks" in messages[0]
        assert found["the same graph"]  # of SyncBatchNorm
