"""Relative steps of models whose parameters are sharded are those of one process with whole parameters."""

from __future__ import annotations

import copy
import functools
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput, parallelize_module

import pathsgd
from pathsgd import PathAdam, PathMuon, PathNormalized, PathSGD
from support import networks
from support.ranks import run_on_ranks

STEPS = 25

OPTIMIZERS = {
    "PathMuon": lambda m, g: PathMuon(m, g, lr=0.02, weight_decay=0.1),
    "PathAdam": lambda m, g: PathAdam(m, g, lr=0.02, weight_decay=0.1),
    "PathSGD": lambda m, g: PathSGD(m, g, lr=0.02, momentum=0.9, relative=True),
    "plain": lambda m, g: PathSGD(m, g, lr=0.001, momentum=0.9),
}

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)
    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))

class Decoder(nn.Module):
    """As tensor parallel transformers are written."""
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.attention_norm, self.attention = nn.LayerNorm(8), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 6)
    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return self.head(self.norm(x))

def make():
    torch.manual_seed(0)
    return Decoder().double()

SHAPE = (4, 4)
@functools.cache
def traced():
    return pathsgd.trace(make(), torch.zeros(SHAPE, dtype=torch.int64))

def prepare(): traced()

def parallelize(model, mesh, sequence=True):
    plan = {
        "attention.query": ColwiseParallel(), "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel(), "attention.out": RowwiseParallel(),
        "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if sequence:
        plan |= {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(), "norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    return parallelize_module(model, mesh, plan)

def loss_of(model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randint(6, SHAPE, generator=generator)
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())

def train(model, name, ranks):
    optimizer = OPTIMIZERS[name](model, traced())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in reversed(ranks[0]):
            (loss_of(model, step, rank) / ranks[1]).backward()
        if step==0 and dist.is_initialized() and dist.get_rank()==0 and name == "PathMuon":
            print({n:(p.placements if isinstance(p, DTensor) else None,p.grad.placements if isinstance(p.grad, DTensor) else None) for n,p in model.named_parameters()}, flush=True)
        optimizer.step()
    return [whole(p.detach()) for p in model.parameters()]

def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()

def train_sharded():
    found = {}
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    for name in OPTIMIZERS:
        if world == 2:
            mesh = init_device_mesh("cpu", (2,))
            for seq in (False, True):
                t=time.time()
                found[seq, name] = train(parallelize(make(), mesh, seq), name, ([0], 1)), time.time()-t
        else:
            for seq in (False, True):
                t=time.time()
                m=parallelize(make(), mesh["tp"], seq)
                fully_shard(m, mesh=mesh["dp"])
                found[seq, name] = train(m, name, ([mesh.get_local_rank(0)], 1)), time.time()-t
    return found

def difference(found, expected):
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))

def test_x():
    for world in (2, 4):
        found = run_on_ranks(train_sharded, world)
        for (kind, name), (moved, s) in found[0].items():
            same= all(all(map(torch.equal, moved, other[kind, name][0])) for other in found)
            t=time.time()
            expected = train(make(), name, (range(world//2), world//2))
            s1=time.time()-t
            start = [p.detach() for p in make().parameters()]
            print(world, kind, name, same, difference(moved, expected), difference(start, expected), s, s1)
