"""Plain steps of networks whose gammas are measured, by an implementation and by the reference."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

import pathsgd
from pathsgd import PathNormalized, PathSGD
from pathsgd.graph.path_graph import remember_model
from support.training import pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def start(of=mixed, to=lambda model: model, device=DEVICE):
    """A copy of a model, with its graph."""
    model, graph = copy.deepcopy(of()[0]), copy.copy(of()[1])
    model = to(model.to(device))
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


def both_ways(make, of=mixed, to=lambda model: model, kind="triton", **options):
    """(weights, optimizer) by this implementation and by the reference."""
    found = []
    for implementation in (kind, "reference"):
        model, graph = start(of, to, "cpu" if kind == "blocked" else DEVICE)
        optimizer = make(model, graph, implementation=implementation)
        found.append((run(model, optimizer, **options), optimizer))
        moved = {name for name, p in model.named_parameters() if p.grad is not None}
        if implementation == "blocked":  # it leaves what falls back
            moved = {name for name in moved if graph.parameters[name].normalised}
        assert {optimizer.implementations[name] for name in moved} == {implementation}
    return found


def assert_same(found, expected):
    """Weights and state, to 1e-6 of the largest."""
    assert torch.isfinite(expected[0]).all()
    assert (found[0] - expected[0]).abs().max() <= 1e-6 * expected[0].abs().max()
    ours, theirs = (own[1].state_dict()["state"] for own in (found, expected))
    assert set(ours) == set(theirs)
    for k, state in theirs.items():
        assert set(ours[k]) == set(state)
        for name, value in state.items():
            assert (ours[k][name].shape, ours[k][name].dtype) == (value.shape, value.dtype)
            torch.testing.assert_close(ours[k][name].to(value.device), value, rtol=1e-5, atol=1e-6)


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


def channels_last(model):
    """And a matrix by columns."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            last = torch.channels_last if isinstance(module, nn.Conv2d) else torch.channels_last_3d
            module.to(memory_format=last)
    model.inner.weight.data = model.inner.weight.detach().t().contiguous().t()
    return model


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


def check_rescaled_copies(network, name, implementation):
    """Copies, rescaled or not, compute the same bits after two steps."""
    model, copied, graph, x = pair(network, torch.float32, powers_of_two=True)
    ends = []
    for own in (model, copy.deepcopy(model), copied):
        remembered = copy.copy(graph)
        remember_model(remembered, own)
        optimizer = OPTIMIZERS[name](own.eval(), remembered, lr=1e-5, implementation=implementation)
        for _ in range(2):
            optimizer.zero_grad()
            own(x).square().mean().backward()
            optimizer.step()
        assert implementation in optimizer.implementations.values()
        ends.append(own(x))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
