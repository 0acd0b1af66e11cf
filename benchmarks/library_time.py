"""Time of what is called once or between steps: import, trace, gammas, path_norm, balance.

    python -m benchmarks.library_time [--device cuda] [--nets MLP] [--json FILE]

Beside the forward and backward pass of the same network in the same run. Medians; of ``trace`` and
``balance`` the least of three calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import pathsgd

from .networks import GPT, resnet50, small_image_resnet, stack
from .timing import device_name, median_us

TOKENS = torch.zeros(1, 128, dtype=torch.long)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "MLP 784-4000-4000-10": (lambda: stack(784, 4000, 4000, 10), torch.randn(100, 784)),
    "ResNet-18, 32x32": (small_image_resnet, torch.randn(1, 3, 32, 32)),
    "ResNet-50, 224x224": (resnet50, torch.randn(1, 3, 224, 224)),
    "GPT-2, 12 x 768": (GPT, TOKENS),
}
IMPORTS = "import time, torch; t = time.perf_counter(); import pathsgd; print(time.perf_counter() - t)"
REPEATS = 3


def measure_import() -> float:
    """Seconds of ``import pathsgd`` once torch is imported, in a new process."""
    command = [sys.executable, "-c", IMPORTS]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(REPEATS)]
    return statistics.median(float(run.stdout) for run in runs)


def time_call(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(
    build: Callable[[], nn.Module], x: Tensor, seconds: float, device: torch.device
) -> dict[str, float]:
    """Seconds by what is called."""
    x, calls = x.to(device), []
    for _ in range(REPEATS):
        model = build().to(device)
        traced = time_call(lambda model=model: pathsgd.trace(model, x), device)
        graph = pathsgd.trace(model, x)
        balanced = time_call(lambda model=model, graph=graph: pathsgd.balance(model, graph), device)
        pathsgd.unbalance(model, graph)
        again = time_call(lambda model=model, graph=graph: pathsgd.balance(model, graph), device)
        calls.append({"trace": traced, "balance": balanced, "balance, after unbalance": again})
    numbers = {name: min(call[name] for call in calls) for name in calls[0]}
    model.eval()

    @torch.no_grad()
    def forward() -> None:
        model(x[:1])

    def forward_backward() -> None:
        model.zero_grad()
        model(x).sum().backward()

    @torch.no_grad()
    def path_norm() -> None:
        pathsgd.path_norm(model, graph)

    steps = {
        "forward, batch 1": forward, "forward and backward": forward_backward,
        "gammas": lambda: pathsgd.gammas(model, graph),
    }  # fmt: skip
    if len(graph.parameter_regions()) == 1:  # of several regions one has to be named
        steps["path_norm"] = path_norm
    times = median_us(steps, seconds, device)
    pathsgd.unbalance(model, graph)
    times |= median_us({"gammas, after unbalance": steps["gammas"]}, seconds, device)
    return numbers | {name: microseconds / 1e6 for name, microseconds in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument(
        "--nets", nargs="+", default=[], help="only networks whose names contain one of these"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="for each median")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    results: dict[str, object] = {"machine": device_name(options.device), "torch": torch.__version__}
    results["import"] = round(measure_import(), 4)
    print(f"import pathsgd, after torch: {results['import']} s")
    for name, (build, x) in NETWORKS.items():
        if options.nets and not any(part in name for part in options.nets):
            continue
        times = measure(build, x, options.seconds, options.device)
        results[name] = {call: round(value, 6) for call, value in times.items()}
        print(
            name, *(f"{call} {1e3 * value:.2f} ms" for call, value in times.items()), sep="\n  ", flush=True
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
