"""Time of a training step of PathSGD, BalancedMuon and others beside torch's optimizer of the same kind.

    python -m benchmarks.step_cost [--device cuda] [--nets ResNet GPT] [--sweep] [--json FILE] [--plot FILE]
    python -m benchmarks.step_cost --read FILE --plot FILE

One run, one machine, the methods taken in turn, medians. On a GPU steps are captured in CUDA graphs, and
timed in a loop of Python, too. The floor is the time to read weights and gradients and write weights once, at
the bandwidth of a copy in the same run. Muon orthogonalises as BalancedMuon does. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathsgd

# Private: the ratio to Muon is to show what balancing costs, not another way to orthogonalise.
from pathsgd.muon.balanced_muon import orthogonalize_all

from .league.baselines import Muon
from .league.networks import NETWORKS
from .networks import GPT, ResNet, resnet50, small_image_resnet, stack
from .timing import LR, Step, capture, device_name, median_us

CPU_ROUNDS = 3
"""Rounds with new models: where one happens to lie in memory can cost a third of its speed on a CPU."""


class LikeBalancedMuon(Muon):
    """Muon that orthogonalises as BalancedMuon does."""

    orthogonalize_all = staticmethod(orthogonalize_all)


class NaivePathSGD:
    """Algorithm 1 written by hand for linear layers with ReLU between them, without any fusing."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear)]

    @torch.no_grad()
    def step(self) -> None:
        first, last = self.layers[0].weight, self.layers[-1].weight
        gamma_in = [first.new_ones(first.shape[1])]
        for layer in self.layers[:-1]:
            gamma_in.append(layer.weight.square() @ gamma_in[-1] + layer.bias.square())
        gamma_out = [last.new_ones(last.shape[0])]
        for layer in self.layers[:0:-1]:
            gamma_out.append(gamma_out[-1] @ layer.weight.square())
        for layer, n, m in zip(self.layers, gamma_in, reversed(gamma_out), strict=True):
            layer.weight.sub_(LR * layer.weight.grad / torch.outer(m, n))
            layer.bias.sub_(LR * layer.bias.grad / m)


def _adamw_options(model: nn.Module) -> dict[str, Any]:
    return {"lr": LR, "fused": True, "capturable": next(model.parameters()).is_cuda}


class Method(NamedTuple):
    """An optimizer, and the one of torch's that its steps are compared with."""

    beside: str
    make: Callable[[nn.Module, pathsgd.PathGraph], Any]


SGD, MOMENTUM, ADAMW, MUON = "SGD, fused", "SGD, momentum, fused", "AdamW, fused", "Muon"
METHODS = {
    SGD: Method(SGD, lambda m, g: torch.optim.SGD(m.parameters(), LR, fused=True)),
    "PathSGD": Method(SGD, lambda m, g: pathsgd.PathSGD(m, g, lr=LR)),
    "Path-SGD by hand": Method(SGD, lambda m, g: NaivePathSGD(m)),
    MOMENTUM: Method(MOMENTUM, lambda m, g: torch.optim.SGD(m.parameters(), LR, momentum=0.9, fused=True)),
    "PathSGD, momentum": Method(MOMENTUM, lambda m, g: pathsgd.PathSGD(m, g, lr=LR, momentum=0.9)),
    ADAMW: Method(ADAMW, lambda m, g: torch.optim.AdamW(m.parameters(), **_adamw_options(m))),
    "PathNormalized(AdamW)": Method(
        ADAMW, lambda m, g: pathsgd.PathNormalized(torch.optim.AdamW, m, g, **_adamw_options(m))
    ),
    MUON: Method(MUON, lambda m, g: LikeBalancedMuon(m, LR, LR)),
    "BalancedMuon": Method(MUON, lambda m, g: pathsgd.BalancedMuon(m, g, LR)),
}
RECORDED = {
    "SGD, foreach": SGD, "PathSGD, reference": SGD, "Adagrad": "Adagrad", "PathAdagrad": "Adagrad",
    "PathAdam": ADAMW, "PathMuon": MUON,
}  # fmt: skip
"""Methods of recorded numbers that are not measured any more, and what they were compared with."""
BESIDE = {name: method.beside for name, method in METHODS.items()} | RECORDED
SWEPT = (SGD, "PathSGD", "Path-SGD by hand")
"""Methods that are measured over batch size, width and depth."""
GENERAL = tuple(name for name in METHODS if name != "Path-SGD by hand")
"""Methods that are measured on networks that are not stacks of linear layers."""
HEAVY = (MUON, "BalancedMuon")
"""Timed by themselves: they heat the machine, and clocks go down for all that is timed beside them."""


@dataclass(frozen=True)
class Setting:
    """A network and the batch it is trained on."""

    net: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of the input, batch first."""
    precision: str = "fp32"
    """Or "tf32"; or "bf16", by autocast."""
    tokens: int = 0
    """How many there are, if inputs are tokens; 0 for images and points."""
    channels_last: bool = False
    compiled: bool = False
    """Whether the network is compiled by torch.compile."""
    study: str = "networks"
    """Table or panel of the figure that it belongs to."""
    at: float = math.nan
    """Place on the panel's axis."""
    methods: tuple[str, ...] = tuple(METHODS)

    def build(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().to(device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        if self.tokens:
            x, y = (torch.randint(self.tokens, self.shape, device=device) for _ in range(2))
            return x, y
        x, y = torch.randn(self.shape, device=device), torch.randint(10, self.shape[:1], device=device)
        return (x.to(memory_format=torch.channels_last) if self.channels_last else x), y


@dataclass(frozen=True)
class Row:
    """One method on one network. Times in microseconds."""

    study: str
    net: str
    at: float
    batch: int
    precision: str
    method: str
    train_us: float
    """The whole training step; on a GPU as one CUDA graph."""
    step_us: float
    """The optimizer's step alone, likewise."""
    eager_us: float
    """The same, in a loop of Python."""
    loop_us: float
    """The whole training step, in a loop of Python."""
    floor_us: float
    ratio: float
    """Ratio of train_us to that of torch's optimizer of the same kind."""
    make_us: float = math.nan
    """Time to make the optimizer, once the model is traced."""
    peak_mib: float = math.nan
    """Peak of GPU memory in the first steps, beyond the model."""

    def __str__(self) -> str:
        return (
            f"{self.net:26} batch {self.batch:<5}{self.precision:5}{self.method:22}"
            f"step {self.train_us:10.1f} us  {self.ratio:5.3f} of {BESIDE[self.method]:21}"
            f"optimizer {self.step_us:9.1f} us  in a loop {self.eager_us:9.1f} us of {self.loop_us:10.1f} us"
            f"  floor {self.floor_us:8.1f} us"
        )


class Steps(NamedTuple):
    """Steps of one method, captured on a GPU; its numbers so far; and the gradients, which no graph keeps."""

    train_us: Step
    step_us: Step
    eager_us: Step
    loop_us: Step
    make_us: float
    peak_mib: float
    grads: list[Tensor | None]


def measure(
    setting: Setting, names: Sequence[str], seconds: float, speed: float, device: torch.device
) -> Iterator[Row]:
    """Times the methods; prints those that cannot be. ``speed`` is the memory's, in bytes per us."""
    on_gpu = device.type == "cuda"
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = setting.precision != "fp32"
    x, y = setting.batch(device)
    model = setting.build(device)
    floor = 3 * 4 * sum(p.numel() for p in model.parameters()) / speed
    graph = pathsgd.trace(model, x[:1])
    pool = torch.cuda.graph_pool_handle() if on_gpu else None
    rounds = 1 if on_gpu else CPU_ROUNDS
    times: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        steps: dict[str, Steps] = {}
        for name in names:
            try:
                steps[name] = prepare(setting, METHODS[name], graph, x, y, pool)
            except (RuntimeError, ValueError) as error:
                print(f"not measured: {setting.net}: {name}: {str(error).splitlines()[0]}", flush=True)
        for name, numbers in time_in_turn(steps, seconds / rounds, device).items():
            times.setdefault(name, []).append(numbers)
    medians = {
        name: {key: statistics.median(numbers[key] for numbers in each) for key in each[0]}
        for name, each in times.items()
    }
    for name, numbers in medians.items():
        beside = medians.get(BESIDE[name])
        ratio = numbers["train_us"] / beside["train_us"] if beside else math.nan
        place = (setting.study, setting.net, setting.at, len(x), setting.precision, name)
        yield Row(*place, floor_us=floor, ratio=ratio, **numbers)


def prepare(
    setting: Setting, method: Method, graph: pathsgd.PathGraph, x: Tensor, y: Tensor, pool: Any
) -> Steps:
    model = setting.build(x.device)
    forward = torch.compile(model) if setting.compiled else model
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if x.is_cuda else 0
    began = time.perf_counter()
    optimizer = method.make(forward, graph)
    make_us = (time.perf_counter() - began) * 1e6

    def backward() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast(x.device.type, torch.bfloat16, enabled=setting.precision == "bf16"):
            loss = F.cross_entropy(forward(x).flatten(0, -2), y.flatten())
        loss.backward()

    def train() -> None:
        backward()
        optimizer.step()

    for _ in range(3):
        train()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if x.is_cuda else math.nan
    captured = capture(train, pool) if x.is_cuda else train
    backward()
    step = capture(optimizer.step, pool) if x.is_cuda else optimizer.step
    grads = [parameter.grad for parameter in model.parameters()]
    return Steps(captured, step, optimizer.step, train, make_us, peak, grads)


def time_in_turn(
    steps: dict[str, Steps], seconds: float, device: torch.device
) -> dict[str, dict[str, float]]:
    together = {name: each.train_us for name, each in steps.items() if name not in HEAVY}
    times = {"train_us": median_us(together, seconds, device)}
    for name in HEAVY:
        if name in steps:
            times["train_us"] |= median_us({name: steps[name].train_us}, seconds, device)
    # The loop is last: from there on gradients lie elsewhere.
    for way in ("step_us", "eager_us", "loop_us"):
        if way == "step_us" or device.type == "cuda":
            each_step = {name: getattr(each, way) for name, each in steps.items()}
            times[way] = median_us(each_step, seconds / 4, device)
    times.setdefault("eager_us", times["step_us"])
    times.setdefault("loop_us", times["train_us"])
    return {
        name: {way: by_name[name] for way, by_name in times.items()}
        | {"make_us": each.make_us, "peak_mib": each.peak_mib}
        for name, each in steps.items()
    }


def list_settings(on_gpu: bool, sweep: bool) -> Iterator[Setting]:
    def paper(inputs: int, batch: int = 100, width: int = 4000, **more: Any) -> Setting:
        widths = (inputs, width, width, 10)
        return Setting("-".join(map(str, widths)), functools.partial(stack, *widths), (batch, inputs), **more)

    wide = tuple(METHODS) if on_gpu else tuple(name for name in METHODS if name not in HEAVY)
    yield paper(784, methods=wide)  # orthogonalising layers of 4000 takes minutes on a CPU
    yield paper(784, width=256, precision="tf32" if on_gpu else "fp32")
    yield paper(3072, methods=wide)
    if on_gpu:
        yield paper(3072, precision="tf32")
        yield Setting("16 layers of 2048", functools.partial(stack, *[2048] * 16, 10), (100, 2048))
    yield from general_networks() if on_gpu else cpu_networks()
    if not sweep:
        return
    for batch in (1, 4, 16, 64, 256, 1024, 4096):
        yield paper(784, batch, study="batch", at=batch, methods=SWEPT)
    for width in (256, 512, 1024, 2048, 4096, 8192, 16384):
        yield paper(784, width=width, study="width", at=width, methods=SWEPT)
    for depth in (2, 4, 8, 16, 32, 64):
        make = functools.partial(stack, *[1024] * depth, 10)
        yield Setting(f"{depth} layers of 1024", make, (100, 1024), study="depth", at=depth, methods=SWEPT)


def cpu_networks() -> Iterator[Setting]:
    yield Setting("ResNet-18, 32x32", small_image_resnet, (32, 3, 32, 32), methods=GENERAL)
    yield Setting("VGG of 48 channels", NETWORKS["vgg-48"].build, (32, 3, 32, 32), methods=GENERAL)
    small = functools.partial(GPT, 256, 128, 4, 4, 64)
    yield Setting("GPT, 4 x 128", small, (16, 64), tokens=256, methods=GENERAL)
    yield Setting("GPT, 12 x 768", GPT, (4, 256), tokens=50257, methods=GENERAL)


def general_networks() -> Iterator[Setting]:
    """ResNets, a VGG and GPTs as they are trained on a GPU."""

    def image_net(name: str, make: Callable[[], nn.Module], batch: int, size: int, **more: Any) -> Setting:
        return Setting(name, make, (batch, 3, size, size), methods=GENERAL, **more)

    small = functools.partial(image_net, make=small_image_resnet, batch=128, size=32)
    yield small("ResNet-18, 32x32")
    yield small("ResNet-18, 32x32", precision="tf32")
    yield small("ResNet-18, 32x32", precision="bf16", channels_last=True)
    yield image_net("ResNet-18, 7x7 stem, 32x32", ResNet, 128, 32, precision="tf32")
    yield image_net("ResNet-50, 224x224", resnet50, 64, 224, precision="bf16", channels_last=True)
    yield image_net("VGG of 48 channels", NETWORKS["vgg-48"].build, 128, 32, precision="tf32")
    yield image_net("MLP 3 x 2048", NETWORKS["mlp-2048x3"].build, 128, 32, precision="tf32")
    gpt = functools.partial(Setting, tokens=256, methods=GENERAL)
    yield gpt("GPT, 4 x 512", NETWORKS["gpt-512"].build, (64, 128), precision="tf32")
    yield gpt("GPT, 12 x 768", GPT, (8, 1024), precision="bf16", tokens=50257)
    yield small("ResNet-18, 32x32, compiled", precision="tf32", compiled=True)


def measure_bytes_per_us(device: torch.device) -> float:
    """Bandwidth of a copy, read and write together."""
    source = torch.empty(1 << 26, device=device)
    target = torch.empty_like(source)
    (copy_us,) = median_us({"copy": lambda: target.copy_(source)}, 0.5, device).values()
    return 2 * source.numel() * 4 / copy_us


def measure_all(options: argparse.Namespace) -> tuple[dict[str, str], list[Row]]:
    device, on_gpu = options.device, options.device.type == "cuda"
    seconds = options.seconds or (0.5 if on_gpu else 6.0)
    speed = measure_bytes_per_us(device)
    head = {"machine": device_name(device), "torch": torch.__version__, "copy_TB_per_s": f"{speed / 1e6:.3f}"}
    rows: list[Row] = []
    for setting in list_settings(on_gpu, options.sweep):
        if options.nets and not any(part in setting.net for part in options.nets):
            continue
        wanted = {name for name in options.methods if name in setting.methods}
        wanted |= {BESIDE[name] for name in wanted}
        for row in measure(setting, [name for name in METHODS if name in wanted], seconds, speed, device):
            rows.append(row)
            print(row, flush=True)
        if options.json is not None:
            text = json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1)
            options.json.write_text(f"{text}\n")
    return head, rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--nets", nargs="+", default=[], help="only networks whose names contain one of these"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", default=list(METHODS))
    parser.add_argument("--sweep", action="store_true", help="also over batch size, width and depth")
    parser.add_argument("--seconds", type=float, help="for each measurement; 0.5 on a GPU, 6 on a CPU")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, as they come")
    parser.add_argument("--plot", type=Path, help="draw them to this file, .png or .svg")
    parser.add_argument("--read", type=Path, help="measure nothing: take the numbers from a file of --json")
    options = parser.parse_args(arguments)
    if options.read is not None:
        head = json.loads(options.read.read_text())
        rows = [Row(**row) for row in head.pop("rows")]
        print(*rows, sep="\n")
    else:
        head, rows = measure_all(options)
    if options.plot is not None:
        from .step_cost_plot import draw

        draw(rows, f"{head['machine']}, torch {head['torch']}", options.plot)


if __name__ == "__main__":
    main()
