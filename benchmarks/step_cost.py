"""What a step costs: Path-SGD beside torch's optimizers, whole training step and optimizer step alone.

    python benchmarks/step_cost.py [--sweep] [--json FILE]

One run, one machine, the methods taken in turn; medians. On a GPU every step is captured in a CUDA graph, as
one would run it for speed, and the optimizer's step is also timed eagerly. The floor is the time to read the
weights and gradients and write the weights once, at the bandwidth of a copy measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from resnet import ResNet
from torch import Tensor, nn

from pathsgd import PathAdagrad, PathAdam, PathSGD

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def stack(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class NaivePathSGD:
    """Algorithm 1 as one would write it by hand for a stack of linear layers."""

    def __init__(self, model: nn.Sequential, lr: float) -> None:
        self.layers = [m for m in model if isinstance(m, nn.Linear)]
        self.lr = lr

    @torch.no_grad()
    def step(self) -> None:
        first, last = self.layers[0].weight, self.layers[-1].weight
        into = [first.new_ones(first.shape[1])]
        for layer in self.layers[:-1]:
            into.append(layer.weight.square() @ into[-1] + layer.bias.square())
        out = [last.new_ones(last.shape[0])]
        for layer in self.layers[:0:-1]:
            out.append(out[-1] @ layer.weight.square())
        for layer, n, m in zip(self.layers, into, reversed(out), strict=True):
            assert layer.weight.grad is not None
            assert layer.bias.grad is not None
            layer.weight.sub_(self.lr * layer.weight.grad / torch.outer(m, n))
            layer.bias.sub_(self.lr * layer.bias.grad / m)


Maker = Callable[[nn.Module, Tensor], object]
LR = 1e-30
"""So small that no weight changes: a network that diverges would be timed as one of NaNs."""
METHODS: dict[str, Maker] = {
    "forward and backward": lambda m, x: None,
    "SGD, foreach": lambda m, x: torch.optim.SGD(m.parameters(), LR, foreach=True),
    "SGD, fused": lambda m, x: torch.optim.SGD(m.parameters(), LR, fused=True),
    "PathSGD": lambda m, x: PathSGD(m, x, lr=LR),
    "PathSGD, no compiler": lambda m, x: PathSGD(m, x, lr=LR, implementation="blocked"),
    "PathSGD, reference": lambda m, x: PathSGD(m, x, lr=LR, implementation="reference"),
    "Path-SGD by hand": lambda m, x: NaivePathSGD(m, LR),  # type: ignore[arg-type]
    "SGD, momentum, fused": lambda m, x: torch.optim.SGD(m.parameters(), LR, momentum=0.9, fused=True),
    "PathSGD, momentum": lambda m, x: PathSGD(m, x, lr=LR, momentum=0.9),
    "Adagrad": lambda m, x: torch.optim.Adagrad(m.parameters(), LR, **({} if CUDA else {"fused": True})),
    "PathAdagrad": lambda m, x: PathAdagrad(m, x, LR),
    "AdamW, fused": lambda m, x: torch.optim.AdamW(m.parameters(), LR, fused=True, capturable=CUDA),
    "PathAdam": lambda m, x: PathAdam(m, x, LR, fused=True, capturable=CUDA),
}
BRIEF = ("forward and backward", "SGD, fused", "PathSGD")


@dataclass
class Row:
    net: str
    batch: int
    tf32: bool
    method: str
    train_us: float
    step_us: float
    eager_us: float
    floor_us: float
    ratio: float = math.nan
    """Of the whole training step, to that of fused SGD."""


def median_us(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The median time of each, taken in turn so that a drift of the machine meets all of them."""
    for run in runs.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, run in runs.items():
            times[name].append(_timed(run))
    return {name: statistics.median(values) for name, values in times.items()}


def _timed(run: Callable[[], object]) -> float:
    if not CUDA:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start_event.record()
    for _ in range(20):
        run()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 20 * 1e3


def captured(run: Callable[[], object]) -> Callable[[], object]:
    if not CUDA:
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def bandwidth() -> float:
    """Bytes per microsecond of a copy, read and write together."""
    source = torch.empty(1 << 26, device=DEVICE)
    target = torch.empty_like(source)
    (taken,) = median_us({"copy": lambda: target.copy_(source)}, 0.5).values()
    return 2 * source.numel() * 4 / taken


def measure(
    net: str, make: Callable[[], nn.Module], x: Tensor, classes: int, methods: tuple[str, ...],
    seconds: float, speed: float, tf32: bool = False,
) -> Iterator[Row]:  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    y = torch.randint(classes, (len(x),), device=DEVICE)
    whole, alone, eager = {}, {}, {}
    alive = []  # a captured graph does not keep what it works on
    count = 0
    for name in methods:
        torch.manual_seed(0)
        model = make().to(DEVICE)
        count = sum(p.numel() for p in model.parameters())
        optimizer = METHODS[name](model, x[:1])
        alive.append((model, optimizer))

        def backward(model: nn.Module = model) -> None:
            for parameter in model.parameters():
                parameter.grad = None
            nn.functional.cross_entropy(model(x), y).backward()

        def train(backward: Callable[[], None] = backward, optimizer: object = optimizer) -> None:
            backward()
            if optimizer is not None:
                optimizer.step()  # type: ignore[attr-defined]

        try:
            train()
            whole[name] = captured(train)
            if optimizer is not None:
                backward()
                alone[name] = captured(optimizer.step)  # type: ignore[attr-defined]
                eager[name] = optimizer.step  # type: ignore[attr-defined]
        except Exception as error:
            whole.pop(name, None)
            print(f"{net}: {name} cannot be captured: {str(error).splitlines()[0][:90]}", flush=True)
    took, steps = median_us(whole, seconds), median_us(alone, seconds / 4)
    eagerly = median_us(eager, seconds / 4) if CUDA else steps
    for name in took:
        yield Row(
            net, len(x), tf32, name, took[name], steps.get(name, 0.0), eagerly.get(name, 0.0),
            3 * 4 * count / speed, took[name] / took["SGD, fused"],
        )  # fmt: skip


def small_image_resnet() -> nn.Module:
    """The layers of ResNet-18 with the stem for small images."""
    model = ResNet(classes=10)
    model.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sweep", action="store_true", help="batch 1 to 4096, width 256 to 16384, depth 2 to 64"
    )
    parser.add_argument("--quick", action="store_true", help="the paper's network only")
    parser.add_argument("--seconds", type=float, default=1.0 if CUDA else 8.0, help="for each measurement")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    speed = bandwidth()
    skipped = {"PathSGD, no compiler"} if CUDA else set()
    methods = tuple(options.methods or (name for name in METHODS if name not in skipped))
    machine = (
        torch.cuda.get_device_name() if CUDA else f"{torch.get_num_threads()} threads, {platform.machine()}"
    )
    rows: list[Row] = []

    def add(
        net: str, make: Callable[[], nn.Module], x: Tensor, methods: tuple[str, ...] = methods, **more: bool
    ) -> None:
        for row in measure(net, make, x, 10, methods, options.seconds, speed, **more):
            rows.append(row)
            print(
                f"{row.net:22} batch {row.batch:<5}{'tf32 ' if row.tf32 else '':5}{row.method:22}"
                f"step {row.train_us:10.1f} us  {row.ratio:5.2f} of SGD  optimizer {row.step_us:9.1f} us  "
                f"eager {row.eager_us:9.1f} us  floor {row.floor_us:8.1f} us",
                flush=True,
            )  # fmt: skip
        if options.json:
            head = {"machine": machine, "torch": torch.__version__, "copy_TB_per_s": speed / 1e6}
            options.json.write_text(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1))

    def data(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE)

    add("784-4000-4000-10", lambda: stack(784, 4000, 4000, 10), data(100, 784))
    if not options.quick:
        no_hand = tuple(m for m in methods if m != "Path-SGD by hand")
        add("3072-4000-4000-10", lambda: stack(3072, 4000, 4000, 10), data(100, 3072))
        if CUDA:
            add("3072-4000-4000-10", lambda: stack(3072, 4000, 4000, 10), data(100, 3072), tf32=True)
            add("16 layers of 2048", lambda: stack(*[2048] * 16, 10), data(100, 2048))
            add("ResNet-18, 32x32", small_image_resnet, data(128, 3, 32, 32), no_hand)
    if options.sweep:
        for batch in (1, 4, 16, 64, 256, 1024, 4096):
            add("784-4000-4000-10", lambda: stack(784, 4000, 4000, 10), data(batch, 784), BRIEF)
        for width in (256, 1024, 4096, 16384) if CUDA else (256, 1024, 4096):
            add(
                f"784-{width}-{width}-10",
                lambda width=width: stack(784, width, width, 10),
                data(100, 784),
                BRIEF,
            )
        for depth in (2, 4, 8, 16, 32, 64):
            add(
                f"{depth} layers of 1024",
                lambda depth=depth: stack(*[1024] * depth, 10),
                data(100, 1024),
                BRIEF,
            )


if __name__ == "__main__":
    main()
