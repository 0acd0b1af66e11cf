"""The Triton kernels on a real GPU against the reference: by hand, ``python tests/on_gpu_kernels.py``.

Widths that are no multiple of anything, momentum and decay, fp32, bf16 and fp16, a hundred steps, a step
captured in a CUDA graph under a schedule, the same bits twice. Prints one line each and the count.
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks"), str(HERE.parent / "src")]

from step_cost import captured  # noqa: E402

from networks import SmallResNet, build  # noqa: E402
from pathsgd import PathSGD, path_scales  # noqa: E402

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


def stack(widths, bias=True):
    torch.manual_seed(sum(widths))
    layers = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).cuda()


def data(model):
    torch.manual_seed(0)
    weight = model[0].weight
    return torch.randn(50, weight.shape[1], device="cuda").to(weight.dtype), torch.randint(
        10, (50,), device="cuda"
    )


def backward(model, x, y):
    for parameter in model.parameters():
        parameter.grad = None
    nn.functional.cross_entropy(model(x).float(), y).backward()


def train(model, steps=5, **options):
    optimizer = PathSGD(model, **{"lr": 1e-4, **options})
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


def same_steps():
    for widths, bias, dtype, options in itertools.product(WIDTHS, (True, False), BOUNDS, OPTIONS):
        if not bias and options is not OPTIONS[2]:
            continue
        model = stack(widths, bias).to(dtype)
        expected, _ = train(copy.deepcopy(model), implementation="reference", **options)
        found, optimizer = train(model, implementation="triton", **options)
        (step,) = optimizer._plan._steps.values()
        assert step.carries(list(found.parameters()))
        largest = gap(found, expected)
        assert largest <= BOUNDS[dtype], (widths, bias, dtype, options, largest)
        yield f"{widths} {'bias' if bias else 'no bias'} {dtype} {options}: {largest:.1e}"


def hundred_steps():
    model = stack((784, 1000, 1000, 10))
    expected, _ = train(copy.deepcopy(model), steps=100, implementation="reference", lr=1e-3)
    found, _ = train(model, steps=100, implementation="triton", lr=1e-3)
    largest = gap(found, expected)
    assert largest <= 1e-6, largest
    yield f"a hundred steps: {largest:.1e}"


def same_bits():
    ends = [
        train(stack((100, 257, 513, 10)), steps=20, implementation="triton", momentum=0.9)[0]
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(ends[0].parameters(), ends[1].parameters(), strict=True))
    yield "two runs, the same bits"


def in_a_cuda_graph():
    """A whole training step in a CUDA graph, its lr on the device and changed between replays."""
    model = stack((100, 257, 513, 10))
    other = copy.deepcopy(model)
    x, y = data(model)
    lr = torch.tensor(1e-3, device="cuda")
    optimizer = PathSGD(model, lr=lr, momentum=0.9)

    def step():
        backward(model, x, y)
        optimizer.step()

    replay = captured(step)  # after four steps that warm it up
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
    largest = gap(model, other)
    assert largest <= 1e-6, largest
    yield f"captured, ten replays under a schedule: {largest:.1e}"


def recorded():
    """gamma of a general network, replayed from a recorded graph while its weights move."""
    model, x = build(SmallResNet, torch.float32)
    model, x = model.cuda(), x.cuda()
    optimizer = PathSGD(model, x, lr=1e-6)
    for _ in range(40):
        backward(model, x, torch.tensor([0, 1], device="cuda"))
        optimizer.step()
    assert optimizer.source._recorded_scales
    found, expected = optimizer.source.gammas(2), path_scales(model, optimizer.graph)
    largest = max(((found[n].dense() - g).abs().max() / g.max()).item() for n, g in expected.items())
    assert largest <= 1e-5, largest
    yield f"recorded gammas after forty steps: {largest:.1e}"


def odd_layouts():
    model = stack((100, 257, 513, 10))
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    expected, _ = train(copy.deepcopy(model), implementation="reference")
    found, _ = train(model, implementation="triton")
    largest = gap(found, expected)
    assert largest <= 1e-6, largest
    yield f"a transposed weight: {largest:.1e}"


def main():
    import triton

    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    done = 0
    for test in (same_steps, hundred_steps, same_bits, in_a_cuda_graph, recorded, odd_layouts):
        for line in test():
            print(line)
            done += 1
    print(f"{done} passed, 0 failed")


if __name__ == "__main__":
    main()
