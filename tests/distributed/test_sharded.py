"""Models whose parameters are sharded: gamma and steps are those of one process with whole parameters."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pathsgd
from pathsgd import PathMuon, PathNormalized, PathSGD
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.geometry.sharded import local_part, shards_of
from support import cases, networks
from support.collectives import counted_numbers
from support.ranks import run_on_ranks

WORLD = 2
STEPS = 3
CASES = [
    cases.Mlp, cases.ConvPool, cases.Strided, cases.Transposed, cases.BatchNorm, cases.Tied, cases.Recurrent,
    cases.Embedded,
]  # fmt: skip


def prepare():
    """Traced once for all ranks."""
    for case in CASES:
        cases.traced(case)
    for make, _ in MODELS.values():
        traced(make)


def shard(model, blocks):
    """``fully_shard`` of the whole model, or of its blocks first."""
    for block in model.children() if blocks else ():
        if any(True for _ in block.parameters()) and not isinstance(block, nn.ModuleList):
            fully_shard(block)
    return fully_shard(model)


# gamma


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


def measure_everything():
    found = {}
    for case in CASES:
        model = cases.build(case)
        whole, graph = copy.deepcopy(model), cases.traced(case)
        shard(model, blocks=case is not cases.Tied)
        for p, exponents in [(2, None), (2, True), (1, False), (math.inf, True)]:
            found[case.__name__, p, exponents] = compare_gammas(whole, model, graph, p, exponents)
    model = parallel_mlp(whole := make_mlp())
    graph = pathsgd.trace(whole)
    for p, exponents in [(2, None), (2, True), (math.inf, False)]:
        found["tensor parallel", p, exponents] = compare_gammas(whole, model, graph, p, exponents)
    return found


def trace_everything():
    """Tracing a model before and after it is sharded gives the same graph."""
    same = []
    for make, shape in MODELS.values():
        before, model = traced(make), shard(make(), blocks=True)
        after = pathsgd.trace(model, torch.zeros(shape, dtype=torch.float64))
        same.append(before.nodes == after.nodes and before.parameters == after.parameters)
    with torch.device("meta"):
        model = fully_shard(make_mlp())
    same.append(pathsgd.trace(model).nodes == pathsgd.trace(make_mlp()).nodes)
    same.append(pathsgd.trace(parallel_mlp(make_mlp())).nodes == pathsgd.trace(make_mlp()).nodes)
    return same


def count_numbers():
    """The largest message of a step, and that of the largest layer's gradient."""
    found = {}
    stack = nn.Sequential(nn.Linear(50, 80), nn.ReLU(), nn.Linear(80, 70), nn.ReLU(), nn.Linear(70, 5))
    convs = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)
    )
    for name, model, x in [("linear", stack, torch.ones(1, 50)), ("conv", convs, torch.ones(1, 3, 5, 5))]:
        fully_shard(model)
        optimizer = PathSGD(model, x)
        model(x).sum().backward()
        with counted_numbers() as by_kind, CommDebugMode() as calls:
            optimizer.step()
        sent = [n for numbers in by_kind.values() for n in numbers]
        assert len(sent) == calls.get_total_counts()  # DTensor sends nothing by itself
        found[name] = sent, [p.numel() for p in model.parameters()]
    return found


def refuse():
    """What is not supported is an error."""
    messages = []

    def expect(function):
        with pytest.raises(pathsgd.PathError) as raised:
            function()
        messages.append(str(raised.value))

    x = torch.ones(3, 6, dtype=torch.float64)
    model = make_mlp()
    optimizers = [PathSGD(model), PathMuon(model), PathNormalized(torch.optim.Adam, model)]
    fully_shard(model)
    model(x).sum().backward()
    for optimizer in optimizers:
        expect(optimizer.step)
    expect(lambda: PathSGD(model, max_relative_step=0.1))
    expect(lambda: PathSGD(model, shared="gram"))
    expect(lambda: pathsgd.path_norm(model))
    expect(lambda: pathsgd.balance(model))
    partial = DTensor.from_local(torch.ones(2), model[0].weight.device_mesh, [Partial()])
    expect(lambda: shards_of(partial))
    return messages


# Steps


def make_mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5, bias=False)
    ).double()


def parallel_mlp(model):
    """Tensor parallel: sharded over outputs, over inputs, and not at all."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(copy.deepcopy(model), init_device_mesh("cpu", (WORLD,)), plan)


class Convolutional(nn.Sequential):
    """With batch norm, whose statistics every rank has of its own, and an uneven number of channels."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3),
            nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip


def make_convolutional():
    torch.manual_seed(0)
    return Convolutional().double()


def make_transformer():
    return networks.build(networks.Transformer)[0]


MODELS = {
    "mlp": (make_mlp, (3, 6)),
    "convolutional": (make_convolutional, (4, 3, 4, 4)),
    "transformer": (make_transformer, networks.Transformer.example),
}
OPTIMIZERS = {
    "PathSGD": lambda m, g: PathSGD(m, g, lr=1e-3, momentum=0.9, weight_decay=0.1, nesterov=True),
    "p=1": lambda m, g: PathSGD(m, g, lr=1e-4, p=1, refresh_every=2),
    "AdamW": lambda m, g: PathNormalized(torch.optim.AdamW, m, g, lr=1e-3, weight_decay=0.1),
}


@functools.cache
def traced(make):
    (shape,) = (shape for other, shape in MODELS.values() if other is make)
    return pathsgd.trace(make(), torch.zeros(shape, dtype=torch.float64))


def loss_of(model, shape, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = (1 + rank) * torch.randn(*shape, dtype=torch.float64, generator=generator)
    return model(x).square().mean()


def clip(optimizer, step):
    if step % 2:
        pathsgd.clip_path_grad_norm_(optimizer, 0.01)


def train_sharded():
    found = {}
    for kind, (make, shape) in MODELS.items():
        for name, optimizer_of in OPTIMIZERS.items():
            for blocks in (False, True) if name == "PathSGD" else (False,):
                model = shard(make(), blocks)
                optimizer = optimizer_of(model, traced(make))
                for step in range(STEPS):
                    optimizer.zero_grad()
                    loss_of(model, shape, step, dist.get_rank()).backward()
                    clip(optimizer, step)
                    optimizer.step()
                found[kind, name, blocks] = [p.full_tensor().detach() for p in model.parameters()]
    return found


def train_tensor_parallel():
    """All ranks see the same batch."""
    found = {}
    for name, optimizer_of in OPTIMIZERS.items():
        for model in (make_mlp(), parallel_mlp(make_mlp())):
            optimizer = optimizer_of(model, traced(make_mlp))
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, (3, 6), step, 0).backward()
                clip(optimizer, step)
                optimizer.step()
            moved = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
            found.setdefault(name, []).append([p.detach() for p in moved])
    return found


def resume_from_checkpoint():
    """By torch.distributed.checkpoint: asking for the state of an optimizer that has none takes a step."""
    found = []
    for optimizer_of in OPTIMIZERS.values():
        mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("replicate", "shard"))
        models = [fully_shard(make_mlp(), mesh=mesh) for _ in range(2)]
        optimizers = [optimizer_of(model, traced(make_mlp)) for model in models]

        def run(k, steps, models=models, optimizers=optimizers):
            for step in steps:
                optimizers[k].zero_grad()
                loss_of(models[k], (3, 6), step, dist.get_rank()).backward()
                optimizers[k].step()

        before = local_weights(models[1])
        get_state_dict(models[1], optimizers[1])
        unmoved = all(map(torch.equal, before, local_weights(models[1])))
        run(0, range(2))
        saved = copy.deepcopy(get_state_dict(models[0], optimizers[0]))
        set_state_dict(models[1], optimizers[1], model_state_dict=saved[0], optim_state_dict=saved[1])
        for k in range(2):
            run(k, range(2, 4))
        found.append(unmoved and all(map(torch.equal, *map(local_weights, models))))
    return found


def local_weights(model):
    return [p.to_local().detach().clone() for p in model.parameters()]


def train_in_one_process(make, shape, optimizer_of):
    model = make()
    optimizer = optimizer_of(model, traced(make))
    for step in range(STEPS):
        buffers = copy.deepcopy(dict(model.named_buffers()))
        optimizer.zero_grad()
        for rank in reversed(range(WORLD)):
            model.load_state_dict(buffers, strict=False)
            (loss_of(model, shape, step, rank) / WORLD).backward()
        clip(optimizer, step)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def run_everything():
    return {
        "gammas": measure_everything(),
        "same graphs": trace_everything(),
        "sent": count_numbers(),
        "refused": refuse(),
        "trained": train_sharded(),
        "tensor parallel": train_tensor_parallel(),
        "resumed": resume_from_checkpoint(),
    }


def test_sharded_models():
    """One test, since starting the processes takes long."""
    first, second = run_on_ranks(run_everything, WORLD)
    for found in (first, second):
        check_measurements(found)
    for (kind, name, blocks), moved in first["trained"].items():
        assert all(map(torch.equal, moved, second["trained"][kind, name, blocks]))
        make, shape = MODELS[kind]
        if not blocks:
            expected = train_in_one_process(make, shape, OPTIMIZERS[name])
        for a, b in zip(moved, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), (kind, name, blocks)


def check_measurements(found):
    assert all(found["resumed"])
    for name, (expected, moved) in found["tensor parallel"].items():
        for a, b in zip(moved, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name
    for case, difference in found["gammas"].items():
        assert difference < 1e-12, case
    assert all(found["same graphs"])
    sent, sizes = found["sent"]["linear"]
    assert max(sent) <= 80 + 70 + 5  # the biases of all layers are sent together
    assert sum(sent) < sum(sizes) / 10
    sent, sizes = found["sent"]["conv"]
    assert max(sent) <= 16 * 3 * 3  # channels times places
    replaced, unsupported = found["refused"][:3], found["refused"][3:]
    assert all("fully_shard" in message for message in replaced)
    assert all("sharded" in message for message in unsupported)
    assert len(unsupported) == 5
