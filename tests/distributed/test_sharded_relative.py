"""Relative steps of models whose parameters are sharded are those of one process with whole parameters."""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scale import calls as scale
from scale.counting import Llama, recorded
from scale.shapes import LlamaSize, stack_shape
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import pathsgd
from pathsgd import PathAdam, PathMuon, PathSGD
from pathsgd.geometry.rescale import apply_factors
from pathsgd.geometry.sharded import local_part, shards_of
from pathsgd.graph.unit_classes import unit_classes_of
from pathsgd.optim.relative.spectral import FIRST
from support import networks
from support.collectives import counted_numbers
from support.ranks import run_on_ranks

STEPS = {"PathMuon": 20, "PathAdam": 20, "PathSGD": 5, "plain": 5}
OPTIMIZERS = {
    "PathMuon": lambda m, g: PathMuon(m, g, lr=0.02, weight_decay=0.1),
    "PathAdam": lambda m, g: PathAdam(m, g, lr=0.02, weight_decay=0.1),
    "PathSGD": lambda m, g: PathSGD(m, g, lr=0.02, momentum=0.9, relative=True),
    "plain": lambda m, g: PathSGD(m, g, lr=1e-3, momentum=0.9),
}


class Mlp(nn.Sequential):
    """Five rows, of which four ranks hold two, two, one and none."""

    example = (6, 6)

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 7))


class Convolutional(nn.Sequential):
    example = (4, 3, 4, 4)

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip


class Attention(nn.Module):
    """Heads are counted by what a rank holds of the queries."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        heads = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """As those are written that are tensor parallel."""

    example = (4, 4)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.attention_norm, self.attention = nn.LayerNorm(8), Attention()
        self.mlp_norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return self.head(self.norm(x))


def make(kind):
    torch.manual_seed(0)
    return kind().double()


@functools.cache
def traced(kind):
    return pathsgd.trace(make(kind), batch(kind, 0, 0)[0])


def prepare():
    """Traced once for all ranks."""
    for kind in (Mlp, Convolutional, networks.Transformer, Decoder):
        traced(kind)
    for size in (LLAMA, PLAIN_LLAMA):
        traced_llama(size)


def batch(kind, step, rank):
    """(inputs, random numbers that targets are made from)."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if kind is Decoder:
        return torch.randint(6, kind.example, generator=generator), generator
    return (1 + rank) * torch.randn(*kind.example, dtype=torch.float64, generator=generator), generator


def loss_of(model, kind, step, rank):
    x, generator = batch(kind, step, rank)
    y = model(x)
    return (y - torch.randn(*y.shape, dtype=y.dtype, generator=generator)).square().mean()


def step_on(model, optimizer, kind, step, ranks):
    """A step on the mean over the batches of these ranks."""
    optimizer.zero_grad()
    buffers = copy.deepcopy(dict(model.named_buffers()))
    for rank in reversed(ranks):
        model.load_state_dict(buffers, strict=False)
        (loss_of(model, kind, step, rank) / len(ranks)).backward()
    if not optimizer.relative and step % 2:
        pathsgd.clip_path_grad_norm_(optimizer, 1e-3)
    optimizer.step()


def train(model, kind, name, ranks, steps=None):
    """The whole parameters after so many steps."""
    optimizer = OPTIMIZERS[name](model, traced(kind))
    for step in range(steps or STEPS[name]):
        step_on(model, optimizer, kind, step, ranks)
    return whole_parameters(model)


def whole_parameters(model):
    return [
        p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()
    ]


def assert_equal_to_one_process(found, kind, name, ranks):
    expected = train(make(kind), kind, name, range(ranks))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-9 * b.abs().max(), (kind, name)


# Ways of sharding


def parallelize(model, mesh):
    """Tensor parallel with sequence parallel norms, whose gradients are sums over ranks."""
    sharded, gathered = {"input_layouts": Shard(1)}, {"desired_input_layouts": Replicate()}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "attention": PrepareModuleInput(**sharded, **gathered),
        **dict.fromkeys(("attention.query", "attention.key", "attention.value"), ColwiseParallel()),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp": PrepareModuleInput(**sharded, **gathered),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(**sharded, output_layouts=Replicate()),
        **dict.fromkeys(("attention_norm", "mlp_norm", "norm"), SequenceParallel()),
    }
    return parallelize_module(model, mesh, plan)


def train_tensor_parallel():
    """All ranks see the same batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: train(parallelize(make(Decoder), mesh), Decoder, name, range(1))
        for name in ("PathMuon", "PathAdam", "plain")
    }


def train_on_a_mesh():
    """fully_shard over one axis, tensor parallel over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found = {}
    for name in ("PathMuon", "PathAdam", "plain"):
        model = fully_shard(parallelize(make(Decoder), mesh["tensor"]), mesh=mesh["data"])
        check_parts(model)
        rank = mesh.get_local_rank("data")
        found[name] = train(model, Decoder, name, range(rank, rank + 1))
    return found


def check_parts(model):
    """What is taken for this rank's part is that."""
    for p in model.parameters():
        part = p.full_tensor()
        for shard in shards_of(p):
            part = part.narrow(shard.dim, shard.start, shard.length)
        assert torch.equal(part, local_part(p))


def train_fully_sharded(kind, name, steps=None, **options):
    rank = dist.get_rank()
    return train(fully_shard(make(kind), **options), kind, name, range(rank, rank + 1), steps)


def train_with_options():
    """Parameters kept in the memory of the CPU; and a mesh of copies of sharded models."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return [
        train_fully_sharded(Mlp, "PathMuon", 4, **options)
        for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"mesh": mesh})
    ]


# A rescaled copy


def rescale(model, graph, exponent, powers_of_two):
    """Every unit times 2 to the power of up to +-exponent."""
    units = unit_classes_of(graph)
    drawn = torch.rand(units.count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = exponent * (2 * drawn - 1)
    apply_factors(graph.tensors(model), units, torch.exp2(drawn.round() if powers_of_two else drawn))
    return model


def train_rescaled():
    """The outputs of a network and of its rescaled copy after training; by powers of two in fp32, where one
    of them needs exponents, to the last bit."""
    x, ranks = batch(Mlp, 0, 0)[0], range(dist.get_rank(), dist.get_rank() + 1)
    found = {}
    for name in ("PathMuon", "PathAdam"):
        ends = []
        for exponent in (0, 9):
            model = fully_shard(rescale(make(Mlp), traced(Mlp), exponent, powers_of_two=False))
            train(model, Mlp, name, ranks, 6)
            ends.append(model(x).detach())
        found[name] = ends
    bits, needed = [], []
    for exponent in (0, 40):
        model = rescale(make(Mlp).float(), traced(Mlp), exponent, powers_of_two=True)
        fully_shard(model)
        optimizer = PathMuon(model, traced(Mlp), lr=0.02)
        for _ in range(4):
            optimizer.zero_grad()
            model(x.float()).square().mean().backward()
            optimizer.step()
        bits.append(model(x.float()).detach())
        needed += optimizer.gamma_cache.needs_exponents.values()
    assert needed == [False, True]
    return found, bits


# What is communicated


def count_numbers():
    found = {}
    for make_optimizer in (PathAdam, PathMuon, lambda m, x: PathSGD(m, x, relative=True)):
        model = nn.Sequential(nn.Linear(50, 80), nn.ReLU(), nn.Linear(80, 70), nn.ReLU(), nn.Linear(70, 5))
        x = torch.ones(1, 50)
        fully_shard(model)
        optimizer = make_optimizer(model, x)
        model(x).sum().backward()
        with counted_numbers() as sent, CommDebugMode() as calls:
            optimizer.step()
        assert sum(map(len, sent.values())) == calls.get_total_counts()  # DTensor sends nothing by itself
        found[type(optimizer).__name__] = sent
    return found


LLAMA = LlamaSize(layers=2, width=16, hidden=24, heads=4, kv_heads=2, vocabulary=40)
PLAIN_LLAMA = replace(LLAMA, heads=2, kv_heads=2)


def record_calls(models):
    """The calls of the first step of both optimizers, as (kind, numbers, bytes of one, ranks)."""
    found = {}
    for label, model, graph in models:
        for optimizer_of in (PathAdam, PathMuon):
            optimizer = optimizer_of(model, graph)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            with recorded() as calls, CommDebugMode() as counted:
                optimizer.step()
            assert len(calls) == counted.get_total_counts()
            found[label, optimizer_of.__name__] = [astuple(call) for call in calls]
    return found


def make_llama(size):
    torch.manual_seed(0)
    return Llama(size)


@functools.cache
def traced_llama(size):
    return pathsgd.trace(make_llama(size), torch.zeros(1, 4, dtype=torch.long))


def record_fully_sharded():
    stack = nn.Sequential(nn.Linear(50, 80), nn.ReLU(), nn.Linear(80, 70), nn.ReLU(), nn.Linear(70, 5))
    graph = pathsgd.trace(stack, torch.ones(1, 50))
    llamas = [(k, fully_shard(make_llama(s)), traced_llama(s)) for k, s in enumerate((LLAMA, PLAIN_LLAMA))]
    return record_calls([("stack", fully_shard(stack), graph), *llamas])


def record_on_a_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    models = []
    for k, size in enumerate((LLAMA, PLAIN_LLAMA)):
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate()), "head": (columns := ColwiseParallel()),
            **dict.fromkeys([f"layers.*.attention.{n}" for n in ("query", "key", "value")], columns),
            **dict.fromkeys(["layers.*.mlp.gate", "layers.*.mlp.up"], columns),
            **dict.fromkeys(["layers.*.attention.out", "layers.*.mlp.down"], RowwiseParallel()),
            **dict.fromkeys(["layers.*.attention_norm", "layers.*.mlp_norm", "norm"], SequenceParallel()),
        }  # fmt: skip
        model = parallelize_module(make_llama(size), mesh["tensor"], plan)
        models.append((k, fully_shard(model, mesh=mesh["data"]), traced_llama(size)))
    return record_calls(models)


# Checkpoints


CHECKPOINT = "SHARDED_CHECKPOINT"
SAVED_AFTER, RESUMED_UNTIL = 4, 8
SEEN_BY_ALL = range(2)
"""The batches of every rank: gradients are then the same on any number of ranks."""


def states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save():
    """By torch.distributed.checkpoint, which takes a step to see what state there is."""
    for name in ("PathMuon", "PathAdam"):
        model = fully_shard(make(Mlp))
        before = whole_parameters(model)
        optimizer = OPTIMIZERS[name](model, traced(Mlp))
        states(model, optimizer)
        assert all(map(torch.equal, before, whole_parameters(model)))
        optimizer = OPTIMIZERS[name](model, traced(Mlp))
        for step in range(SAVED_AFTER):
            step_on(model, optimizer, Mlp, step, SEEN_BY_ALL)
        dcp.save(states(model, optimizer), checkpoint_id=Path(os.environ[CHECKPOINT], name))


def load(shard=fully_shard):
    found = {}
    for name in ("PathMuon", "PathAdam"):
        model = shard(make(Mlp))
        optimizer = OPTIMIZERS[name](model, traced(Mlp))
        state = states(model, optimizer)
        dcp.load(state, checkpoint_id=Path(os.environ[CHECKPOINT], name))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for step in range(SAVED_AFTER, RESUMED_UNTIL):
            step_on(model, optimizer, Mlp, step, SEEN_BY_ALL)
        found[name] = whole_parameters(model)
    return found


# The tests. The processes are started once for each number of ranks, since that takes long.


ON_TWO = [
    (networks.Transformer, "PathMuon"), (networks.Transformer, "PathAdam"), (Mlp, "PathSGD"),
    (Convolutional, "PathMuon"),
]  # fmt: skip


def run_on_two():
    save()
    return {
        "fully sharded": [train_fully_sharded(*case) for case in ON_TWO],
        "tensor parallel": train_tensor_parallel(),
        "rescaled": train_rescaled(),
        "sent": count_numbers(),
        "calls": record_fully_sharded(),
    }


def run_on_four():
    return {
        "fully sharded": {name: train_fully_sharded(Mlp, name) for name in ("PathMuon", "PathAdam")},
        "with options": train_with_options(),
        "on a mesh": train_on_a_mesh(),
        "calls": record_on_a_mesh(),
        "loaded": load(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHECKPOINT, str(tmp_path_factory.mktemp("checkpoints")))
        yield


@pytest.fixture(scope="module")
def on_two(folder):
    return run_on_ranks(run_on_two, 2)


@pytest.fixture(scope="module")
def on_four(on_two):
    return run_on_ranks(run_on_four, 4)


def test_fully_sharded_on_two_ranks(on_two):
    for k, (kind, name) in enumerate(ON_TWO):
        first, second = (found["fully sharded"][k] for found in on_two)
        assert all(map(torch.equal, first, second))
        assert_equal_to_one_process(first, kind, name, 2)


def assert_ranks_train_one_model(ranks, way, kind, shares):
    """All the same, to the last bit, and that of one process."""
    for name, moved in ranks[0][way].items():
        assert all(all(map(torch.equal, moved, found[way][name])) for found in ranks)
        assert_equal_to_one_process(moved, kind, name, shares)


def test_fully_sharded_on_four_ranks_of_which_one_holds_nothing(on_four):
    assert_ranks_train_one_model(on_four, "fully sharded", Mlp, 4)


def test_options_of_fully_shard(on_four):
    for found in on_four:
        plain, offloaded, replicated = found["with options"]
        assert all(map(torch.equal, plain, offloaded))
        for a, b in zip(plain, replicated, strict=True):
            assert (a - b).abs().max() <= 1e-9 * b.abs().max()


def test_tensor_parallel(on_two):
    assert_ranks_train_one_model(on_two, "tensor parallel", Decoder, 1)


def test_both_on_a_mesh(on_four):
    assert_ranks_train_one_model(on_four, "on a mesh", Decoder, 2)


def test_a_rescaled_copy_takes_the_same_steps(on_two):
    for found, bits in (found["rescaled"] for found in on_two):
        for plain, rescaled in found.values():
            assert (plain - rescaled).abs().max() <= 1e-9 * plain.abs().max()
        assert torch.equal(*bits)


def test_what_is_communicated(on_two):
    """Vectors as wide as a layer, a few numbers for each block, and Muon's matrices."""
    widest, biases, blocks, columns = 80, 80 + 70 + 5, 6, 50 + 80 + 70
    for found in on_two:
        for name, sent in found["sent"].items():
            gathers, sums, exchanged = (
                sent[key] for key in ("all_gather_into_tensor", "all_reduce", "all_to_all_single")
            )
            assert len(gathers) <= 4, name  # of layers, and of all biases together
            assert max(gathers) <= biases, name
            # PathAdam multiplies steps by vectors, all blocks together.
            assert max(sums) <= (columns if name == "PathAdam" else widest), name
            # Sizes, gradients and turns; the directions that SGD normalises.
            assert sum(n <= 3 * blocks for n in sums) == (4 if name == "PathSGD" else 3), name
            assert not sent["broadcast"]
            # What a rank holds of the two matrices that are orthogonalised is sent there and back.
            matrices = 80 * 50 + 70 * 80
            assert len(exchanged) == (2 if name == "PathMuon" else 0)
            assert sum(exchanged) <= 1.1 * matrices
    assert sum(sum(found["sent"]["PathMuon"]["all_to_all_single"]) for found in on_two) == 2 * matrices


def test_calls_are_those_that_the_tables_of_scale_are_made_of(on_two, on_four):
    """One by one, of rank 0."""
    shapes = {"stack": stack_shape(50, 80, 70, 5), 0: LLAMA.shape(), 1: PLAIN_LLAMA.shape()}
    for found, (data, tensor) in ((on_two[0], (2, 1)), (on_four[0], (2, 2))):
        for (label, optimizer), calls in found["calls"].items():
            listed = scale.step_calls(shapes[label], data, tensor, iterations=FIRST)
            names = scale.OF_ADAM if optimizer == "PathAdam" else scale.OF_MUON
            expected = sum((listed[name] for name in names), Counter())
            assert Counter(scale.Call(*call) for call in calls) == expected, (label, optimizer, tensor)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_two_ranks_load_on_one_and_on_four(on_four):
    """Whole parameters are one rank's."""
    loaded = [load(lambda model: model), *(found["loaded"] for found in on_four)]
    for name in ("PathMuon", "PathAdam"):
        expected = make(Mlp)
        optimizer = OPTIMIZERS[name](expected, traced(Mlp))
        for step in range(RESUMED_UNTIL):
            step_on(expected, optimizer, Mlp, step, SEEN_BY_ALL)
        for found in loaded:
            for a, b in zip(found[name], expected.parameters(), strict=True):
                assert (a - b).abs().max() <= 1e-9 * b.abs().max(), name
