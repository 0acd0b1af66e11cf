"""The Triton kernels on a GPU against the reference: ``pytest -m gpu``.

Odd widths, every rule, fp32, bf16 and fp16, a hundred steps, steps captured in CUDA
graphs by the user and by the optimizer, the same bits twice.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import PathNormalized, PathSGD
from pathsgd.cli.timing import capture
from support.networks import SmallResNet, build
from support.stacks import is_fused
from support.stacks import stack as cpu_stack

pytestmark = pytest.mark.gpu

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""In low precision: a few roundings of the weights over five steps, which the next gradients amplify."""
OPTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.01},
    {"p": 1},
    {"p": 4, "lr": 1e-5},
]
WIDTHS = [(100, 257, 513, 10), (64, 128, 96, 80, 72, 10)]
MANY_PARTS = (20, 30, 40, 5000)
"""A last layer that is divided among all processors."""
BASES = {
    "SGD": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-3, "weight_decay": 0.1, "lr_decay": 0.1}),
    "Adagrad, tiny eps": (torch.optim.Adagrad, {"lr": 1e-3, "eps": 1e-20}),
    "Adam": (torch.optim.Adam, {"lr": 1e-4, "weight_decay": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.1, "fused": True}),
}


def stack(widths, bias=True):
    return cpu_stack(*widths, bias=bias).cuda()


def make(model, name="PathSGD", **options):
    if name == "PathSGD":
        return PathSGD(model, **{"lr": 1e-4, **options})
    base, own = BASES[name]
    return PathNormalized(base, model, **{**own, **options})


def data(model):
    torch.manual_seed(0)
    weight = model[0].weight
    x = torch.randn(50, weight.shape[1], device="cuda").to(weight.dtype)
    return x, torch.randint(10, (50,), device="cuda")


def backward(model, x, y):
    for parameter in model.parameters():
        parameter.grad = None
    nn.functional.cross_entropy(model(x).float(), y).backward()


def train(model, name="PathSGD", steps=5, **options):
    optimizer = make(model, name, **options)
    x, y = data(model)
    for _ in range(steps):
        backward(model, x, y)
        optimizer.step()
    return model, optimizer


def gap(a, b):
    return max(
        ((p.float() - q.float()).norm() / q.float().norm()).item()
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


CASES = [
    *((WIDTHS[0], torch.float32, "PathSGD", options) for options in OPTIONS),
    *((widths, dtype, "PathSGD", OPTIONS[2]) for dtype in BOUNDS for widths in WIDTHS),
    (MANY_PARTS, torch.float32, "PathSGD", OPTIONS[1]),
    *((WIDTHS[0], torch.float32, name, {}) for name in BASES),
    (WIDTHS[0], torch.bfloat16, "Adam", {}),
]


@pytest.mark.parametrize(("widths", "dtype", "name", "options"), CASES, ids=str)
def test_steps_are_those_of_the_reference(widths, dtype, name, options):
    for bias in (True, False):
        model = stack(widths, bias).to(dtype)
        expected, _ = train(copy.deepcopy(model), name, implementation="reference", **options)
        found, optimizer = train(model, name, implementation="triton", **options)
        assert is_fused(optimizer)
        assert gap(found, expected) <= BOUNDS[dtype]


def test_a_hundred_steps():
    """With gradients that are given: a network's own would amplify the rounding of its forward pass."""
    ends = []
    for implementation in ("reference", "triton"):
        model = stack((784, 1000, 1000, 10))
        optimizer = PathSGD(model, lr=1e-3, momentum=0.9, weight_decay=0.1, implementation=implementation)
        generator = torch.Generator("cuda").manual_seed(0)
        for _ in range(100):
            for p in model.parameters():
                p.grad = 1e-3 * torch.randn(p.shape, device="cuda", generator=generator)
            optimizer.step()
        ends.append(model)
    assert gap(ends[1], ends[0]) <= 1e-6


@pytest.mark.parametrize("name", ["PathSGD", *BASES])
def test_two_runs_give_the_same_bits(name):
    ends = [train(stack(WIDTHS[0]), name, steps=20, implementation="triton")[0] for _ in range(2)]
    assert all(map(torch.equal, *(list(model.parameters()) for model in ends)))


def test_a_whole_step_in_a_cuda_graph_under_a_schedule():
    model = stack(WIDTHS[0])
    other = copy.deepcopy(model)
    x, y = data(model)
    lr = torch.tensor(1e-3, device="cuda")
    optimizer = PathSGD(model, lr=lr, momentum=0.9)

    def step():
        backward(model, x, y)
        optimizer.step()

    replay = capture(step)
    reference = PathSGD(other, lr=1e-3, momentum=0.9, implementation="reference")
    for _ in range(4):
        backward(other, x, y)
        reference.step()
    for k in range(10):
        lr.fill_(1e-3 * 0.9**k)
        reference.param_groups[0]["lr"] = 1e-3 * 0.9**k
        replay()
        backward(other, x, y)
        reference.step()
    assert gap(model, other) <= 1e-6


def test_adam_in_a_cuda_graph():
    """Its steps are counted on the device. Replayed they are those of the same kernels one by one."""
    ends = []
    for replays in (0, 10):
        model = stack(WIDTHS[0])
        x, y = data(model)
        optimizer = PathNormalized(torch.optim.AdamW, model, lr=1e-4, weight_decay=0.1, capturable=True)

        def step(model=model, x=x, y=y, optimizer=optimizer):
            backward(model, x, y)
            optimizer.step()

        run = capture(step) if replays else step
        for _ in range(replays or 14):
            run()
        ends.append(model)
    assert gap(ends[1], ends[0]) <= 1e-6


def test_captured_gammas_follow_the_weights():
    """gamma of a general network, replayed from a CUDA graph while its weights move."""
    model, x = build(SmallResNet, torch.float32)
    model, x = model.cuda(), x.cuda()
    optimizer = PathSGD(model, x, lr=1e-6)
    for _ in range(40):
        backward_of = nn.functional.cross_entropy(model(x).flatten(1), torch.tensor([0, 1], device="cuda"))
        optimizer.zero_grad()
        backward_of.backward()
        optimizer.step()
    assert optimizer.gamma_cache.is_captured(2)
    found, expected = optimizer.gamma_cache.gammas(2), pathsgd.gammas(model, optimizer.graph)
    for name, gamma in expected.items():
        dense = gamma.dense()
        assert (found[name].dense() - dense).abs().max() <= 1e-5 * dense.max(), name


CAPTURED = [
    *((widths, name) for widths in WIDTHS for name in ("PathSGD", *BASES)),
    ((32,) * 41, "PathSGD"),  # too deep for plain floats
]


@pytest.mark.parametrize(("widths", "name"), CAPTURED)
def test_steps_that_the_optimizer_captures_itself(widths, name):
    """Under a schedule, with gradients in two places by turns, and weights written in between."""
    ends = []
    for implementation in ("reference", "triton"):
        model = stack(widths)
        optimizer = make(model, name, implementation=implementation, lr=1e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        places = [[torch.empty_like(p) for p in model.parameters()] for _ in range(2)]
        gammas = {n: gamma.dense() for n, gamma in pathsgd.gammas(model).items()}
        generator = torch.Generator("cuda").manual_seed(0)
        for k in range(24):
            for (n, p), grad in zip(model.named_parameters(), places[k % 2], strict=True):
                # As large as moves a weight by a part of itself, whatever its gamma is.
                size = gammas[n] * p.detach().abs() if name == "PathSGD" else 1e-2 * gammas[n].sqrt()
                p.grad = grad.normal_(generator=generator).mul_(size)
            if k == 12:
                with torch.no_grad():
                    model[0].weight.mul_(2)
                    model[2].weight.mul_(0.5)
            optimizer.step()
            schedule.step()
        ends.append(model)
    assert is_fused(optimizer)
    assert gap(ends[1], ends[0]) <= 1e-6


def test_a_transposed_weight():
    model = stack(WIDTHS[0])
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    expected, _ = train(copy.deepcopy(model), implementation="reference")
    found, _ = train(model, implementation="triton")
    assert gap(found, expected) <= 1e-6
