"""The Triton kernels on a real GPU against the reference: by hand, ``python tests/on_gpu_kernels.py``.

Widths that are no multiple of anything, every rule, fp32, bf16 and fp16, a hundred steps, steps captured in
CUDA graphs, the same bits twice. Prints one line each and the count.
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from pathsgd import PathNormalized, PathSGD, gammas  # noqa: E402
from pathsgd.console.timing import capture as captured  # noqa: E402
from support.networks import SmallResNet, build  # noqa: E402

GPU = torch.device("cuda")

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
NORMALIZED = {
    "SGD, momentum, decay": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-3, "weight_decay": 0.1, "lr_decay": 0.1}),
    "Adagrad, hardly any eps": (torch.optim.Adagrad, {"lr": 1e-3, "eps": 1e-20}),
    "Adam": (torch.optim.Adam, {"lr": 1e-4, "weight_decay": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.1, "fused": True}),
}


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


def train(model, steps=5, base=None, **options):
    make = PathSGD if base is None else lambda *args, **kwargs: PathNormalized(base, *args, **kwargs)
    optimizer = make(model, **{"lr": 1e-4, **options})
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


class Wrong(AssertionError):
    """A comparison that failed."""


def within(what, largest, bound):
    if not largest <= bound:
        raise Wrong(f"{what}: {largest:.1e} > {bound:.0e}")
    return f"{what}: {largest:.1e}"


def one(widths, dtype, options, bias=True, name="", base=None):
    model = stack(widths, bias).to(dtype)
    expected, _ = train(copy.deepcopy(model), base=base, implementation="reference", **options)
    found, optimizer = train(model, base=base, implementation="triton", **options)
    (step,) = optimizer._plan._steps.values()
    what = f"{widths} {'bias' if bias else 'no bias'} {str(dtype)[6:]} {name} {options}"
    if not step.carries(list(found.parameters())):
        raise Wrong(f"{what}: not by the kernels")
    return within(what, gap(found, expected), BOUNDS[dtype])


def comparisons():
    """What is to be looked at, each by itself so that one failure hides no other."""
    for options in OPTIONS:
        yield lambda o=options: one(WIDTHS[0], torch.float32, o)
    for dtype, widths in itertools.product(BOUNDS, WIDTHS):
        yield lambda d=dtype, w=widths: one(w, d, OPTIONS[2])
    yield lambda: one(WIDTHS[0], torch.float32, OPTIONS[2], bias=False)
    yield lambda: one(MANY_PARTS, torch.float32, OPTIONS[1])
    for name, (base, options) in NORMALIZED.items():
        yield lambda n=name, b=base, o=options: one(WIDTHS[0], torch.float32, o, name=n, base=b)
    yield lambda: one(WIDTHS[0], torch.bfloat16, NORMALIZED["Adam"][1], name="Adam", base=torch.optim.Adam)
    yield from (hundred_steps, same_bits, in_a_cuda_graph, adam_in_a_cuda_graph, recorded, odd_layouts)
    for widths in WIDTHS:
        for name in ("PathSGD", *NORMALIZED):
            yield lambda w=widths, n=name: replayed(w, n)
    yield lambda: replayed([32] * 41, "PathSGD")  # too deep for plain floats


def hundred_steps():
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
    return within("a hundred steps", gap(ends[1], ends[0]), 1e-6)


def same_bits():
    ends = [
        train(stack((100, 257, 513, 10)), steps=20, implementation="triton", momentum=0.9)[0]
        for _ in range(2)
    ]
    if not all(torch.equal(a, b) for a, b in zip(ends[0].parameters(), ends[1].parameters(), strict=True)):
        raise Wrong("two runs differ")
    return "two runs, the same bits"


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

    replay = captured(step, GPU)  # after four steps that warm it up
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
    return within("captured, ten replays under a schedule", gap(model, other), 1e-6)


def adam_in_a_cuda_graph():
    """Its steps are counted on the device. Replayed they are those of the same kernels one by one."""
    ends = []
    for replays in (0, 10):
        model = stack((100, 257, 513, 10))
        x, y = data(model)
        optimizer = PathNormalized(torch.optim.AdamW, model, lr=1e-4, weight_decay=0.1, capturable=True)

        def step(model=model, x=x, y=y, optimizer=optimizer):
            backward(model, x, y)
            optimizer.step()

        run = captured(step, GPU) if replays else step  # after four steps that warm it up
        for _ in range(replays or 14):
            run()
        ends.append(model)
    return within("AdamW captured, ten replays", gap(ends[1], ends[0]), 1e-6)


def recorded():
    """gamma of a general network, replayed from a recorded graph while its weights move."""
    model, x = build(SmallResNet, torch.float32)
    model, x = model.cuda(), x.cuda()
    optimizer = PathSGD(model, x, lr=1e-6)
    for _ in range(40):
        backward(model, x, torch.tensor([0, 1], device="cuda"))
        optimizer.step()
    if not optimizer.source._recorded_scales:
        raise Wrong("gamma was not recorded")
    found, expected = optimizer.source.gammas(2), gammas(model, optimizer.graph)
    largest = max(((found[n].dense() - g).abs().max() / g.max()).item() for n, g in expected.items())
    return within("recorded gammas after forty steps", largest, 1e-5)


def replayed(widths, name):
    """Steps that the optimizer recorded itself: under a schedule, with gradients in two places by turns, and
    weights that somebody else writes in between."""
    ends = []
    for implementation in ("reference", "triton"):
        model = stack(widths)
        options = {"lr": 1e-3, "implementation": implementation}
        if name == "PathSGD":
            optimizer = PathSGD(model, momentum=0.9, weight_decay=0.1, **options)
        else:
            base, own = NORMALIZED[name]
            optimizer = PathNormalized(base, model, **{**own, **options})
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        places = [[torch.empty_like(p) for p in model.parameters()] for _ in range(2)]
        gammas = gammas(model)
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
    (step,) = optimizer._plan._steps.values()
    if len(step.implementation._recorded._graphs) != 2:
        raise Wrong(f"{name}: {len(step.implementation._recorded._graphs)} steps recorded, not 2")
    return within(f"{len(widths) - 1} layers, {name}, replayed", gap(ends[1], ends[0]), 1e-6)


def odd_layouts():
    model = stack((100, 257, 513, 10))
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    expected, _ = train(copy.deepcopy(model), implementation="reference")
    found, _ = train(model, implementation="triton")
    return within("a transposed weight", gap(found, expected), 1e-6)


def main():
    import triton

    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    passed = failed = 0
    for compare in comparisons():
        try:
            print(compare(), flush=True)
            passed += 1
        except Exception as error:
            print(f"FAILED {type(error).__name__}: {error}", flush=True)
            failed += 1
    print(f"{passed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
