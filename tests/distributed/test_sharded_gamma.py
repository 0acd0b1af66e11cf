"""gamma of a model whose parameters are sharded is that of the whole model, and so is its graph. What is not
supported is an error."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pathsgd
from pathsgd import PathMuon, PathNormalized, PathSGD
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.geometry.sharded import local_part, shards_of
from support import cases, networks
from support.ranks import run_on_ranks
from support.sharded import Convolutional, Mlp, make, shard, traced

WORLD = 2
CASES = [
    cases.Mlp, cases.ConvPool, cases.Strided, cases.Transposed, cases.BatchNorm, cases.Tied, cases.Recurrent,
    cases.Embedded,
]  # fmt: skip
TRACED = (Convolutional, networks.Transformer)


def prepare():
    """Traced once for all ranks."""
    for case in CASES:
        cases.traced(case)
    for kind in (Mlp, *TRACED):
        traced(kind)


def parallel_mlp():
    """Tensor parallel: sharded over outputs, over inputs, and not at all."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(make(Mlp), init_device_mesh("cpu", (WORLD,)), plan)


def compare_gammas(whole, sharded, graph, p, exponents):
    """The largest difference of log2 gamma between a rank's part and the same part of the whole."""
    expected = measure_gammas(graph, graph.tensors(whole), p, exponents=exponents)
    found = measure_gammas(graph, graph.tensors(sharded, sharded=True), p, exponents=exponents)
    worst = 0.0
    for name, parameter in sharded.named_parameters():
        own, want = found[name].log2(), expected[name].log2()
        for part in shards_of(parameter):
            want = want.narrow(part.dim, part.start, part.length)
        assert own.shape == want.shape == local_part(parameter).shape == found[name].shape, name
        z = found[name].weight_to_z(parameter.detach())
        assert z.shape == parameter.shape
        if own.numel():
            worst = max(worst, float(torch.where(own == want, 0, (own - want).abs()).max()))
    return worst


def measure_gammas_of_everything():
    found = {}
    for case in CASES:
        model = cases.build(case)
        whole, graph = copy.deepcopy(model), cases.traced(case)
        shard(model, blocks=case is not cases.Tied)
        for p, exponents in [(2, None), (2, True), (1, False), (math.inf, True)]:
            found[case.__name__, p, exponents] = compare_gammas(whole, model, graph, p, exponents)
    for p, exponents in [(2, None), (2, True), (math.inf, False)]:
        gap = compare_gammas(make(Mlp), parallel_mlp(), traced(Mlp), p, exponents)
        found["tensor parallel", p, exponents] = gap
    return found


def trace_again():
    """The graphs of models that were sharded before they were traced, beside those of whole ones."""
    same = []
    for kind in TRACED:
        model = shard(make(kind), blocks=True)
        after = pathsgd.trace(model, torch.zeros(kind.example, dtype=torch.float64))
        same.append(after.nodes == traced(kind).nodes and after.parameters == traced(kind).parameters)
    with torch.device("meta"):
        models = fully_shard(make(Mlp)), parallel_mlp()
    return same + [pathsgd.trace(model).nodes == pathsgd.trace(make(Mlp)).nodes for model in models]


def refuse():
    messages = []

    def expect(function):
        with pytest.raises(pathsgd.PathError) as raised:
            function()
        messages.append(str(raised.value))

    model = make(Mlp)
    optimizers = [PathSGD(model), PathMuon(model), PathNormalized(torch.optim.Adam, model)]
    fully_shard(model)
    model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
    for optimizer in optimizers:
        expect(optimizer.step)
    flattened = FullyShardedDataParallel(make(Mlp), device_id=torch.device("cpu"))
    for optimizer_of in (PathSGD, PathMuon):
        expect(lambda make=optimizer_of: make(flattened, torch.ones(3, 6, dtype=torch.float64)))
    expect(lambda: PathSGD(model, max_relative_step=0.1))
    expect(lambda: PathSGD(model, shared="gram"))
    expect(lambda: pathsgd.path_norm(model))
    expect(lambda: pathsgd.balance(model, q=math.inf))
    partial = DTensor.from_local(torch.ones(2), model[0].weight.device_mesh, [Partial()])
    expect(lambda: shards_of(partial))
    return messages


def test_gamma_is_that_of_the_whole_model():
    for gaps in run_on_ranks(measure_gammas_of_everything, WORLD):
        for case, gap in gaps.items():
            assert gap < 1e-12, case


def test_tracing_a_sharded_model_gives_the_same_graph():
    assert all(map(all, run_on_ranks(trace_again, WORLD)))


def test_what_is_not_supported_is_an_error():
    for messages in run_on_ranks(refuse, WORLD):
        made_before, flattened, others = messages[:3], messages[3:5], messages[5:]
        assert all("fully_shard" in message for message in made_before)
        assert all("keeps parameters flattened" in message for message in flattened)
        assert all("sharded" in message for message in others)
        assert len(others) == 5
