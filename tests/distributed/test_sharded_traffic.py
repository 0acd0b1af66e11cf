"""What ranks send in a step of a sharded model: vectors as wide as a layer, a few numbers for each block, and
Muon's matrices. benchmarks/scale lists the calls that docs/scale.md counts: they are those that are made."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from scale import calls as scale
from scale.counting import Llama, recorded
from scale.shapes import LlamaSize, stack_shape
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import pathsgd
from pathsgd import PathAdam, PathMuon, PathSGD
from pathsgd._torch import ALL_GATHER
from pathsgd.optim.relative.spectral import FIRST
from support.collectives import counted_numbers
from support.ranks import run_on_ranks

OPTIMIZERS = {
    "PathMuon": PathMuon,
    "PathAdam": PathAdam,
    "relative PathSGD": lambda m, x: PathSGD(m, x, relative=True),
    "PathSGD": PathSGD,
}
STACK = (50, 80, 70, 5)
LLAMA = LlamaSize(layers=2, width=16, hidden=24, heads=4, kv_heads=2, vocabulary=40)
PLAIN_LLAMA = replace(LLAMA, layers=1, heads=2, kv_heads=2)


def make_stack():
    a, b, c, d = STACK
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))


def make_convolutions():
    convolutions = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 5))


# Between two ranks


def count_numbers():
    """How many numbers a rank sends in a step, by optimizer and kind of call."""
    found = {}
    cases = [(name, make_stack, torch.ones(1, 50)) for name in OPTIMIZERS]
    for name, make, x in [*cases, ("convolutions", make_convolutions, torch.ones(1, 3, 5, 5))]:
        model = fully_shard(make())
        optimizer = OPTIMIZERS.get(name, PathSGD)(model, x)
        model(x).sum().backward()
        with counted_numbers() as sent, CommDebugMode() as calls:
            optimizer.step()
        assert sum(map(len, sent.values())) == calls.get_total_counts()  # DTensor sends nothing by itself
        found[name] = sent
    return found


def test_what_is_sent():
    ranks = run_on_ranks(count_numbers, 2)
    check_relative_steps(ranks)
    check_plain_steps(ranks)


def check_relative_steps(ranks):
    widest, biases, blocks, columns = 80, 80 + 70 + 5, 6, 50 + 80 + 70
    for found in ranks:
        for name in ("PathMuon", "PathAdam", "relative PathSGD"):
            sent = found[name]
            gathers, sums, exchanged = (sent[key] for key in (ALL_GATHER, "all_reduce", "all_to_all_single"))
            assert len(gathers) <= 4, name  # of layers, and of all biases together
            assert max(gathers) <= biases, name
            # PathAdam multiplies steps by vectors, all blocks together.
            assert max(sums) <= (columns if name == "PathAdam" else widest), name
            # Sizes, gradients and turns; the directions that SGD normalises.
            assert sum(n <= 3 * blocks for n in sums) == (4 if name == "relative PathSGD" else 3), name
            assert not sent["broadcast"]
            # What a rank holds of the two matrices that are orthogonalised is sent there and back.
            matrices = 80 * 50 + 70 * 80
            assert len(exchanged) == (2 if name == "PathMuon" else 0)
            assert sum(exchanged) <= 1.1 * matrices
    assert sum(sum(found["PathMuon"]["all_to_all_single"]) for found in ranks) == 2 * matrices


def check_plain_steps(ranks):
    for found in ranks:
        sent = [n for numbers in found["PathSGD"].values() for n in numbers]
        assert max(sent) <= 80 + 70 + 5  # the biases of all layers are sent together
        assert sum(sent) < sum(p.numel() for p in make_stack().parameters()) / 10
        sent = [n for numbers in found["convolutions"].values() for n in numbers]
        assert max(sent) <= 16 * 3 * 3  # channels times places


# The calls that benchmarks/scale lists


@functools.cache
def traced_llama(size):
    return pathsgd.trace(Llama(size), torch.zeros(1, 4, dtype=torch.long))


def shard_llama(size, mesh):
    """Tensor parallel over the second axis, if there are several, fully sharded over the first."""
    model = Llama(size)
    if mesh["tensor"].size() > 1:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate()), "head": (columns := ColwiseParallel()),
            **dict.fromkeys([f"layers.*.attention.{n}" for n in ("query", "key", "value")], columns),
            **dict.fromkeys(["layers.*.mlp.gate", "layers.*.mlp.up"], columns),
            **dict.fromkeys(["layers.*.attention.out", "layers.*.mlp.down"], RowwiseParallel()),
            **dict.fromkeys(["layers.*.attention_norm", "layers.*.mlp_norm", "norm"], SequenceParallel()),
        }  # fmt: skip
        parallelize_module(model, mesh["tensor"], plan)
    return fully_shard(model, mesh=mesh["data"])


@pytest.fixture
def mesh(request):
    """Of ranks of which only the first is there: what it would receive is made up."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param[0] * request.param[1])
    yield init_device_mesh("cpu", request.param, mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)], indirect=True, ids=str)
def test_calls_are_those_that_the_tables_of_scale_are_made_of(mesh):
    """One by one, in the first step."""
    cases = [(size.shape(), shard_llama(size, mesh), traced_llama(size)) for size in (LLAMA, PLAIN_LLAMA)]
    if mesh["tensor"].size() == 1:
        stack = make_stack()
        graph = pathsgd.trace(stack, torch.ones(1, 50))
        cases.append((stack_shape(*STACK), fully_shard(stack, mesh=mesh["data"]), graph))
    for shape, model, graph in cases:
        for optimizer_of, names in ((PathAdam, scale.OF_ADAM), (PathMuon, scale.OF_MUON)):
            optimizer = optimizer_of(model, graph)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            with recorded(answer=True) as calls, CommDebugMode() as others:
                optimizer.step()
            assert not others.get_total_counts()  # DTensor sends nothing by itself
            listed = scale.step_calls(shape, *mesh.shape, iterations=FIRST)
            assert Counter(calls) == sum((listed[name] for name in names), Counter()), optimizer_of
