"""Small networks to be sharded, their batches, and training them on ranks or in one process."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import pathsgd
from pathsgd import BalancedMuon, PathNormalized, PathSGD
from pathsgd.balancing.rescale import apply_factors
from pathsgd.graph.unit_classes import unit_classes_of

OPTIMIZERS = {
    "BalancedMuon": lambda m, g: BalancedMuon(m, g, weight_decay=0.1),
    "PathSGD": lambda m, g: PathSGD(m, g, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "PathSGD, p=1": lambda m, g: PathSGD(m, g, lr=1e-4, momentum=0.9, nesterov=True, p=1),
    "AdamW on paths": lambda m, g: PathNormalized(torch.optim.AdamW, m, g, lr=1e-3, weight_decay=0.1),
    "Adagrad on paths": lambda m, g: PathNormalized(torch.optim.Adagrad, m, g, lr=1e-3),
    "SGD": lambda m, g: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "AdamW": lambda m, g: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
}
"""torch's own show by how much gradients differ."""


class Mlp(nn.Sequential):
    """Five rows, of which four ranks hold two, two, one and none."""

    example = (6, 6)

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 7))


class Convolutional(nn.Sequential):
    """A network with batch norm, whose statistics differ between ranks, and an uneven number of channels."""

    example = (4, 3, 4, 4)

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip


class Decoder(nn.Module):
    """A decoder as those are written that are tensor parallel: a rank has as many heads as it has of the
    queries. The gradient of a key's bias would be rounding."""

    example = (4, 4)

    def __init__(self):
        super().__init__()
        self.embedding, self.norms = nn.Embedding(6, 8), nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8, bias=k != 1) for k in range(4))
        self.mlp, self.head = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)), nn.Linear(8, 6)

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.norms[0](x)
        heads = (f(y).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x))


def shard(model, blocks):
    """``fully_shard`` of the whole model, or of its blocks first."""
    for block in model.children() if blocks else ():
        if any(True for _ in block.parameters()) and not isinstance(block, nn.ModuleList):
            fully_shard(block)
    return fully_shard(model)


def parallelize(model, mesh):
    """Tensor parallel with sequence parallel norms, whose gradients are sums over ranks."""
    columns, rows = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norms.*": SequenceParallel(),
        **dict.fromkeys(("query", "key", "value", "mlp.0"), columns),
        **dict.fromkeys(("out", "mlp.2"), rows),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def make(kind, dtype=torch.float64):
    torch.manual_seed(0)
    return kind().double().to(dtype)


def make_rescaled(kind, exponent, powers_of_two=False, dtype=torch.float64):
    """Every unit times 2 to the power of up to +-exponent."""
    model, units = make(kind, dtype), unit_classes_of(traced(kind))
    drawn = torch.rand(units.count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = exponent * (2 * drawn - 1)
    factors = torch.exp2(drawn.round() if powers_of_two else drawn)
    apply_factors(traced(kind).tensors(model), units, factors)
    return model


@functools.cache
def traced(kind):
    return pathsgd.trace(make(kind), batch(kind, 0, 0, torch.float64)[0])


def batch(kind, step, rank, dtype):
    """(inputs, random numbers that targets are made from)."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if kind is Decoder:
        return torch.randint(6, kind.example, generator=generator), generator
    x = (1 + rank) * torch.randn(*kind.example, dtype=torch.float64, generator=generator)
    return x.to(dtype), generator


def loss_of(model, kind, step, rank, dtype):
    x, generator = batch(kind, step, rank, dtype)
    y = model(x)
    target = torch.randn(*y.shape, dtype=torch.float64, generator=generator)
    return (y - target.to(dtype)).square().mean()


def step_on(model, optimizer, kind, step, ranks, dtype=torch.float64, count=None):
    """A step on the mean over the batches of these ranks, and the losses of each, from the last to the first:
    gloo adds up the gradients of two in this order. ``count``: over how many it is the mean."""
    optimizer.zero_grad()
    buffers, losses = copy.deepcopy(dict(model.named_buffers())), []
    for rank in reversed(ranks):
        model.load_state_dict(buffers, strict=False)
        losses.append(loss_of(model, kind, step, rank, dtype))
        (losses[-1] / (count or len(ranks))).backward()
    if step % 2 and isinstance(optimizer, (PathSGD, PathNormalized)):
        pathsgd.clip_path_grad_norm_(optimizer, 1e-3)
    optimizer.step()
    return torch.stack(losses).detach()


def train(model, kind, name, ranks, steps, dtype=torch.float64):
    """The losses of every step and batch, and the whole parameters after the last step."""
    optimizer = OPTIMIZERS[name](model, traced(kind))
    losses = [step_on(model, optimizer, kind, step, ranks, dtype) for step in range(steps)]
    return torch.stack(losses), whole_parameters(model)


def whole_parameters(model):
    return [
        p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()
    ]


def are_equal(tensors, others):
    return all(map(torch.equal, tensors, others))
