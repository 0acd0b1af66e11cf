"""gamma of a model whose parameters are sharded is that of the whole model, and so is its graph. A rescaled
copy takes the same steps. Anything that is not supported is an error."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pathsgd
from pathsgd import BalancedMuon, PathNormalized, PathSGD
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.muon.round import EVERY
from pathsgd.sharding import local_part, shards_of
from support import cases, networks
from support.ranks import run_on_ranks
from support.sharded import (
    OPTIMIZERS,
    Convolutional,
    Mlp,
    batch,
    make,
    make_rescaled,
    shard,
    step_on,
    traced,
)

WORLD = 2
ORDERS = (1, 2, 6, math.inf)
CASES = [case for case in cases.CASES if case is not cases.ByHand]
"""fully_shard takes no scalar parameters."""
TRACED = (Convolutional, networks.Transformer)


def prepare():
    """Traced once for all ranks."""
    for case in CASES:
        cases.traced(case)
    for kind in (Mlp, *TRACED):
        traced(kind)


def parallelize_mlp(model):
    """Tensor parallel: sharded over outputs, over inputs, and not at all."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)


def compare_gammas(whole, sharded, graph, p):
    """The largest difference of log2 gamma between a rank's part and the same part of the whole."""
    expected = measure_gammas(graph, graph.tensors(whole), p)
    gammas = measure_gammas(graph, graph.tensors(sharded, sharded=True), p)
    worst = 0.0
    for name, parameter in sharded.named_parameters():
        part, want = gammas[name].log2(), expected[name].log2()
        for cut in shards_of(parameter):
            want = want.narrow(cut.dim, cut.start, cut.length)
        assert part.shape == want.shape == local_part(parameter).shape == gammas[name].shape, name
        assert gammas[name].weight_to_z(parameter.detach()).shape == parameter.shape
        if part.numel():
            worst = max(worst, float(torch.where(part == want, 0, (part - want).abs()).max()))
    return worst


def measure_gammas_of_everything():
    models = [(case, cases.build(case), cases.traced(case)) for case in CASES]
    models += [(kind, make_rescaled(Mlp, 60), traced(Mlp)) for kind in ("FSDP2", "tensor parallel")]
    gaps = {}
    for case, whole, graph in models:
        model = copy.deepcopy(whole)
        model = parallelize_mlp(model) if case == "tensor parallel" else shard(model, case is not cases.Tied)
        gaps |= {(str(case), p): compare_gammas(whole, model, graph, p) for p in ORDERS}
    return gaps


def test_gamma_is_that_of_the_whole_model():
    for gaps in run_on_ranks(measure_gammas_of_everything, WORLD):
        for case, gap in gaps.items():
            assert gap < 1e-12, case


# Rescaled copies


def train_rescaled():
    """The outputs of a network and of its rescaled copy after training; and of two that differ by powers of
    two, in fp32."""
    rank, close, bits = dist.get_rank(), {}, {}
    for name in ("BalancedMuon", "PathSGD", "AdamW on paths", "Adagrad on paths"):
        for outputs, dtype, most in ((close, torch.float64, 9), (bits, torch.float32, 40)):
            outputs[name] = []
            for exponent in (0, most):
                model = make_rescaled(Mlp, exponent, dtype is torch.float32, dtype)
                optimizer = OPTIMIZERS[name](fully_shard(model), traced(Mlp))
                for step in range(EVERY + 2):
                    step_on(model, optimizer, Mlp, step, range(rank, rank + 1), dtype)
                outputs[name].append(model(batch(Mlp, 0, 0, dtype)[0]).detach())
    return close, bits


def test_a_rescaled_copy_takes_the_same_steps():
    """The bound is the last bit for powers of two."""
    for close, bits in run_on_ranks(train_rescaled, WORLD):
        for name, (plain, rescaled) in close.items():
            assert (plain - rescaled).abs().max() <= 1e-9 * plain.abs().max(), name
            assert torch.equal(*bits[name]), name


# Graphs, and errors


def trace_again():
    """The graphs of models that were sharded before they were traced, beside those of whole ones."""
    same = []
    for kind in TRACED:
        model = shard(make(kind), blocks=True)
        after = pathsgd.trace(model, torch.zeros(kind.example, dtype=torch.float64))
        same.append(after.nodes == traced(kind).nodes and after.parameters == traced(kind).parameters)
    with torch.device("meta"):
        models = fully_shard(make(Mlp)), parallelize_mlp(make(Mlp))
    return same + [pathsgd.trace(model).nodes == pathsgd.trace(make(Mlp)).nodes for model in models]


def test_tracing_a_sharded_model_gives_the_same_graph():
    assert all(map(all, run_on_ranks(trace_again, WORLD)))


def refuse():
    messages = []

    def expect(function):
        with pytest.raises(pathsgd.PathError) as raised:
            function()
        messages.append(str(raised.value))

    model = make(Mlp)
    optimizers = [PathSGD(model), BalancedMuon(model), PathNormalized(torch.optim.Adam, model)]
    fully_shard(model)
    model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
    for optimizer in optimizers:
        expect(optimizer.step)
    flattened = FullyShardedDataParallel(make(Mlp), device_id=torch.device("cpu"))
    for optimizer_of in (PathSGD, BalancedMuon):
        expect(lambda make=optimizer_of: make(flattened, torch.ones(3, 6, dtype=torch.float64)))
    expect(lambda: pathsgd.path_norm(model))
    expect(lambda: pathsgd.balance(model, q=math.inf))
    partial = DTensor.from_local(torch.ones(2), model[0].weight.device_mesh, [Partial()])
    expect(lambda: shards_of(partial))
    too_far_apart = fully_shard(make_rescaled(Mlp, 400))
    expect(lambda: pathsgd.gammas(too_far_apart, traced(Mlp), p=4))
    return messages


def test_what_is_not_supported_is_an_error():
    for messages in run_on_ranks(refuse, WORLD):
        made_before, flattened, others = messages[:3], messages[3:5], messages[5:-1]
        assert all("fully_shard" in message for message in made_before)
        assert all("keeps parameters flattened" in message for message in flattened)
        assert all("sharded" in message for message in others)
        assert len(others) == 3
        assert "differ by more than fp64 can hold" in messages[-1]
