"""Plain steps of any network by one kernel over all tensors, against the reference; here interpreted."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import PathNormalized, PathSGD
from pathsgd.graph.path_graph import remember_model
from pathsgd.optim import gamma_cache, measurement
from pathsgd.optim.fused.gpu import multi_tensor
from pathsgd.optim.fused.gpu.multi_tensor_kernel import OUTER, PLAIN, STRIDED
from support import cases
from support.measure_again import capture_on_cpu
from support.networks import Transformer, Vgg
from support.training import pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = {kind.value for kind in (PLAIN, OUTER, STRIDED)}


def normalized(kind, **options):
    return lambda m, g, **more: PathNormalized(kind, m, graph=g, **{**options, **more})


def sgd(**options):
    return lambda m, g, **more: PathSGD(m, graph=g, **{**options, **more})


OPTIMIZERS = {
    "PathSGD": sgd(lr=1e-2),
    "momentum": sgd(lr=1e-2, momentum=0.9, weight_decay=0.1),
    "nesterov": sgd(lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    "fallback": sgd(lr=1e-2, fallback_lr=1e-1, weight_decay=0.1),
    "tensor lr": sgd(lr=torch.tensor(1e-2, device=DEVICE), momentum=0.5),
    "SGD": normalized(torch.optim.SGD, lr=1e-2, weight_decay=0.1),
    "coupled": normalized(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "Adagrad": normalized(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1),
    "Adam": normalized(torch.optim.Adam, lr=1e-2, weight_decay=0.1, maximize=True),
    "AdamW": normalized(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
}


class Mixed(nn.Module):
    """Kernels, whose gammas are stored whole; linear layers, by vectors; a parameter that falls back."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.volume = nn.Conv3d(1, 2, 2, bias=False)
        self.inner, self.head = nn.Linear(16, 12), nn.Linear(12, 5)
        self.unused = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.volume(x[:, None]).mean((3, 4))).flatten(1)
        return self.head(torch.relu(self.inner(nn.functional.pad(x, (0, 2)))))


@functools.cache
def mixed():
    torch.manual_seed(0)
    model = Mixed().eval()
    with torch.no_grad():
        model.inner.weight[2] = 0  # a dead unit
        model.inner.bias[2] = 0
    return model, pathsgd.trace(model, torch.ones(1, 3, 6, 6))


def start(of=mixed, to=lambda model: model):
    """A copy of a model, with its graph."""
    model, graph = copy.deepcopy(of()[0]), copy.copy(of()[1])
    model = to(model.to(DEVICE))
    remember_model(graph, model)
    return model, graph


def place_like(grad, parameter):
    return torch.empty_like(parameter).copy_(grad)


def run(model, optimizer, steps=2, first=0, place=place_like, between=lambda *_: None):
    """With gradients that are given: Adam would take the sign of a network's rounding."""
    for k in range(first, first + steps):
        generator = torch.Generator().manual_seed(k)
        for p in model.parameters():
            if p.requires_grad:
                p.grad = place(torch.randn(p.shape, generator=generator), p)
        between(model, optimizer, k)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def both_ways(make, of=mixed, to=lambda model: model, **options):
    """(weights, optimizer) by the kernel and by the reference."""
    found = []
    for implementation in ("triton", "reference"):
        model, graph = start(of, to)
        optimizer = make(model, graph, implementation=implementation)
        found.append((run(model, optimizer, **options), optimizer))
        moved = {name for name, p in model.named_parameters() if p.grad is not None}
        assert {optimizer.implementations[name] for name in moved} == {implementation}
    return found


def assert_same(found, expected):
    """Weights and state, to 1e-6 of the largest."""
    assert torch.isfinite(expected[0]).all()
    assert (found[0] - expected[0]).abs().max() <= 1e-6 * expected[0].abs().max()
    ours, theirs = (own[1].state_dict()["state"] for own in (found, expected))
    assert list(ours) == list(theirs)
    for k, state in theirs.items():
        assert set(ours[k]) == set(state)
        for name, value in state.items():
            assert (ours[k][name].shape, ours[k][name].dtype) == (value.shape, value.dtype)
            torch.testing.assert_close(ours[k][name].to(value.device), value, rtol=1e-5, atol=1e-6)


def tensors_of(optimizer):
    return optimizer._dispatch._tensors


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_kernel_takes_the_same_steps(name):
    found, expected = both_ways(OPTIMIZERS[name])
    assert_same(found, expected)
    assert set(tensors_of(found[1]).tiles) == KINDS


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_step_that_is_captured_measures_once(implementation, monkeypatch):
    """Nothing is kept from step to step then, and groups and kernels all ask for gamma."""
    model, graph = start()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "lr": 1e-3}]
    optimizer = PathSGD(groups, graph=graph, lr=1e-2, implementation=implementation)
    measured = []
    measure = measurement.GammaMeasurement.run

    def count(*arguments):
        measured.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(measurement.GammaMeasurement, "run", count)
    monkeypatch.setattr(gamma_cache, "is_capturing", lambda: True)
    run(model, optimizer, steps=2)
    assert len(measured) == 2


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_every_case(case):
    def build():
        return cases.build(case).float(), cases.traced(case)

    assert_same(*both_ways(lambda m, g, **more: OPTIMIZERS["AdamW"](m, g, lr=1e-4, **more), build))


@pytest.mark.parametrize(("network", "name"), [(Vgg, "momentum"), (Vgg, "AdamW"), (Transformer, "Adam")])
def test_rescaled_copies_and_repeated_runs_give_the_same_bits(network, name):
    model, copied, graph, x = pair(network, torch.float32, powers_of_two=True)
    ends = []
    for own in (model, copy.deepcopy(model), copied):
        remembered = copy.copy(graph)
        remember_model(remembered, own)
        optimizer = OPTIMIZERS[name](own.eval(), remembered, lr=1e-5, implementation="triton")
        for _ in range(2):
            optimizer.zero_grad()
            own(x).square().mean().backward()
            optimizer.step()
        assert "triton" in optimizer.implementations.values()
        ends.append(own(x))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def last_axis_first(grad, parameter):
    return grad.to(parameter).movedim(-1, 0).contiguous().movedim(0, -1)


def unaligned(grad, parameter):
    room = torch.empty(grad.numel() + 1, device=parameter.device)
    return room[1:].view(grad.shape).copy_(grad)


def by_turns(grad, parameter):
    """Somewhere else each time, and the first time unaligned."""
    return (place_like if parameter.grad is not None else unaligned)(grad, parameter)


def in_place(grad, parameter):
    return place_like(grad, parameter) if parameter.grad is None else parameter.grad.copy_(grad)


@pytest.mark.parametrize("place", [last_axis_first, unaligned, by_turns])
def test_gradients_in_any_layout(place):
    assert_same(*both_ways(OPTIMIZERS["momentum"], place=place))


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_weights_in_any_layout(name):
    def channels_last(model):
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Conv3d)):
                last = torch.channels_last if isinstance(module, nn.Conv2d) else torch.channels_last_3d
                module.to(memory_format=last)
        model.inner.weight.data = model.inner.weight.detach().t().contiguous().t()
        return model

    found, expected = both_ways(OPTIMIZERS[name], to=channels_last)
    assert not found[1].gamma_cache.model.conv.weight.is_contiguous()
    assert_same(found, expected)


def schedule(model, optimizer, k):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + k)


def decay_more(model, optimizer, k):
    optimizer.param_groups[-1]["weight_decay"] = 0.1 * k


def write_weights(model, optimizer, k):
    with torch.no_grad():
        model.head.weight.mul_(1.5)


def move_weights(model, optimizer, k):
    model.head.weight.data = model.head.weight.detach().clone()


def load_state(model, optimizer, k):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def skip_some(model, optimizer, k):
    if k == 2:
        model.conv.weight.grad = model.inner.bias.grad = None


def unalign(model, optimizer, k):
    if k == 2:
        for p in model.parameters():
            p.grad = unaligned(p.grad, p)


EVENTS = [schedule, decay_more, write_weights, move_weights, load_state, skip_some, unalign]


@pytest.mark.parametrize("event", EVENTS)
def test_what_changes_between_steps_is_noticed(event, monkeypatch):
    """Also if gammas come in the same tensors, as they do from a CUDA graph."""
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(gamma_cache, "WARM_UP", 0)
    made, make = [], multi_tensor.MultiTensorStep
    monkeypatch.setattr(multi_tensor, "MultiTensorStep", lambda *own: made.append(1) or make(*own))
    assert_same(*both_ways(OPTIMIZERS["AdamW"], steps=4, between=event, place=in_place))
    # The first step measures; from the second on gammas lie in the same place.
    assert len(made) == {schedule: 2, write_weights: 2, unalign: 3}.get(event, 4)


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_groups_differ_and_some_parameters_rest(name):
    def make(model, graph, **options):
        first, *rest = model.parameters()
        rest[-1].requires_grad_(False)
        groups = [{"params": [first], "lr": 0.1, "weight_decay": 0.2}, {"params": rest}]
        return OPTIMIZERS[name](groups, graph, **options)

    assert_same(*both_ways(make))


def double_precision(name, model, graph):
    return OPTIMIZERS[name](model.double(), graph, implementation="triton")


def limited(name, model, graph):
    return OPTIMIZERS[name](model, graph, implementation="triton", max_relative_step=0.1)


def incompatible_groups(name, model, graph):
    first, *rest = model.parameters()
    option = {"betas": (0.5, 0.9)} if name == "AdamW" else {"momentum": 0.5}
    return OPTIMIZERS[name]([{"params": [first], **option}, {"params": rest}], graph, implementation="triton")


@pytest.mark.parametrize("make", [double_precision, limited, incompatible_groups])
@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_what_the_kernel_does_not_know_it_leaves(name, make):
    model, graph = start()
    optimizer = make(name, model, graph)
    run(model, optimizer, 1)
    assert set(optimizer.implementations.values()) == {"reference"}


def test_a_base_with_hooks_is_called():
    model, graph = start()
    optimizer = OPTIMIZERS["AdamW"](model, graph, implementation="triton")
    called = []
    optimizer.base.register_step_post_hook(lambda *_: called.append(1))
    run(model, optimizer)
    assert len(called) == 2


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_a_resumed_training_is_the_uninterrupted_one(name):
    model, graph = start()
    optimizer = OPTIMIZERS[name](model, graph, implementation="triton")
    run(model, optimizer)
    resumed, other = copy.deepcopy(model), copy.copy(graph)
    remember_model(other, resumed)
    loaded = OPTIMIZERS[name](resumed, other, implementation="triton")
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ends = [run(m, o, first=2) for m, o in ((model, optimizer), (resumed, loaded))]
    assert torch.equal(*ends)


def test_writes_are_counted():
    """By torch, so that a backward pass through weights that have moved is an error."""
    model, graph = start()
    optimizer = OPTIMIZERS["PathSGD"](model, graph, implementation="triton")
    before = [p._version for p in model.parameters()]
    run(model, optimizer, 1)
    assert all(p._version > count for p, count in zip(model.parameters(), before, strict=True))
