"""``pathsgd bench``: the options, the networks, the table and the JSON file."""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from pathsgd import PathError
from pathsgd.bench.measure import Row, Setting, measure
from pathsgd.bench.methods import GENERAL, METHODS, SWEPT
from pathsgd.console.devices import device_name, find_device
from pathsgd.console.files import write_atomically
from pathsgd.console.networks import GPT, ResNet, resnet50, small_image_resnet, stack
from pathsgd.console.timing import bytes_per_us


@dataclass(frozen=True)
class Bench:
    """Times the whole training step and the optimizer's step alone, for Path-SGD and for torch's optimizers.

    One run, one machine, the methods taken in turn, medians. On a GPU steps are captured in CUDA graphs, and
    timed in a loop of Python, too. Ratios are to torch's optimizer of the same kind, fused if it can be.
    The floor is the time to read weights and gradients and write weights once, at the bandwidth of a copy in
    the same run.

    examples:
      pathsgd bench --quick
      pathsgd bench --device cuda --sweep --json cost.json --plot cost.png
      pathsgd bench --read cost.json --plot cost.svg
    """

    device: str | None = None
    """cpu, cuda, cuda:1; by default a GPU if there is one."""
    quick: bool = False
    """Measure the paper's MNIST network only."""
    sweep: bool = False
    """Measure over batch size, width and depth, too."""
    nets: tuple[str, ...] = ()
    """Only networks whose names contain one of these."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which to measure, beside torch's of the same kind."""
    seconds: float | None = None
    """For each measurement; by default 0.5 on a GPU, 6 on a CPU."""
    json: Path | None = None
    """Write the numbers to this file, as they come."""
    plot: Path | None = None
    """Draw them to this file, .png or .svg."""
    read: Path | None = None
    """Measure nothing: take the numbers from this file of --json."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise PathError(f"Unknown method: {unknown[0]!r} (one of {'; '.join(METHODS)})")


def main(arguments: Sequence[str]) -> int:
    from pathsgd.console.command_line import parse  # which needs tyro

    return run(parse(Bench, arguments, "bench"))


def run(options: Bench) -> int:
    """Measures or reads, and draws."""
    if options.read is not None:
        found, rows = _read(options.read)
        for row in rows:
            print(format_row(row))
    else:
        found, rows = _measure(options)
    if options.plot is not None:
        from pathsgd.bench.plot import draw

        draw(rows, f"{found['machine']}, torch {found['torch']}", options.plot)
        print(f"drawn to {options.plot}")
    return 0


def _read(path: Path) -> tuple[dict[str, str], list[Row]]:
    try:
        found = json.loads(path.read_text())
        return found, [Row(**row) for row in found["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PathError(f"{path} holds no numbers of pathsgd bench --json ({error})") from error


def _measure(options: Bench) -> tuple[dict[str, str], list[Row]]:
    device = find_device(options.device)
    on_gpu = device.type == "cuda"
    seconds = options.seconds or (0.5 if on_gpu else 6.0)
    speed = bytes_per_us(device)
    machine = device_name(device)
    if not on_gpu:
        machine += f", {torch.get_num_threads()} threads, {platform.machine()}"
    head = {"machine": machine, "torch": torch.__version__, "copy_TB_per_s": f"{speed / 1e6:.3f}"}
    rows: list[Row] = []
    for setting in settings(on_gpu, options.quick, options.sweep):
        if options.nets and not any(part in setting.net for part in options.nets):
            continue
        wanted = {name for name in options.methods if name in setting.methods}
        wanted |= {METHODS[name].beside for name in wanted}
        methods = [name for name in METHODS if name in wanted]
        measured, failed = measure(setting, methods, seconds, speed, device)
        rows += measured
        lines = [*map(format_row, measured), *(f"not measured: {reason}" for reason in failed)]
        print("\n".join(lines), flush=True)
        if options.json is not None:
            text = json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1)
            write_atomically(options.json, f"{text}\n".encode())
    return head, rows


def settings(on_gpu: bool, quick: bool, sweep: bool) -> Iterator[Setting]:
    def paper(inputs: int, batch: int = 100, width: int = 4000, **more: object) -> Setting:
        widths = (inputs, width, width, 10)
        name = "-".join(map(str, widths))
        return Setting(name, functools.partial(stack, *widths), (batch, inputs), **more)  # type: ignore[arg-type]

    yield paper(784)
    if not quick and on_gpu:
        yield paper(3072)
        yield paper(3072, precision="tf32")
        yield Setting("16 layers of 2048", functools.partial(stack, *[2048] * 16, 10), (100, 2048))
        yield from general_networks()
    elif not quick:
        yield paper(784, width=256)
        yield paper(3072)
        yield Setting("ResNet-18, 32x32", small_image_resnet, (32, 3, 32, 32), methods=GENERAL)
        yield Setting("GPT, 12 x 768", GPT, (4, 256), tokens=50257, methods=GENERAL)
    if not sweep:
        return
    for batch in (1, 4, 16, 64, 256, 1024, 4096):
        yield paper(784, batch, study="batch", at=batch, methods=SWEPT)
    for width in (256, 512, 1024, 2048, 4096, 8192, 16384):
        yield paper(784, width=width, study="width", at=width, methods=SWEPT)
    for depth in (2, 4, 8, 16, 32, 64):
        make = functools.partial(stack, *[1024] * depth, 10)
        yield Setting(f"{depth} layers of 1024", make, (100, 1024), study="depth", at=depth, methods=SWEPT)


def general_networks() -> Iterator[Setting]:
    """ResNets and a GPT as they are trained on a GPU."""

    def resnet(name: str, make: Callable[[], nn.Module], batch: int, size: int, **more: object) -> Setting:
        return Setting(name, make, (batch, 3, size, size), methods=GENERAL, **more)  # type: ignore[arg-type]

    small = functools.partial(resnet, make=small_image_resnet, batch=128, size=32)
    yield small("ResNet-18, 32x32")
    yield small("ResNet-18, 32x32", precision="tf32")
    yield small("ResNet-18, 32x32", precision="bf16", channels_last=True)
    yield resnet("ResNet-18, 7x7 stem, 32x32", ResNet, 128, 32, precision="tf32")
    yield resnet("ResNet-50, 224x224", resnet50, 64, 224, precision="bf16", channels_last=True)
    yield Setting("GPT, 12 x 768", GPT, (8, 1024), precision="bf16", tokens=50257, methods=GENERAL)
    yield small("ResNet-18, 32x32, compiled", precision="tf32", compiled=True)


def format_row(row: Row) -> str:
    return (
        f"{row.net:26} batch {row.batch:<5}{row.precision:5}{row.method:22}"
        f"step {row.train_us:10.1f} us  {row.ratio:5.3f} of {METHODS[row.method].beside:21}"
        f"optimizer {row.step_us:9.1f} us  in a loop {row.eager_us:9.1f} us of {row.loop_us:10.1f} us  "
        f"floor {row.floor_us:8.1f} us"
    )
