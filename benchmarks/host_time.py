"""How long the host is busy with a step in a loop, where small batches wait for Python.

    python -m benchmarks.host_time [--device cuda] [--steps N]

Prints the medians of the forward and backward pass, of the optimizer's step, and of both with the wait for
the device, for a ResNet-18 at batch 4, methods in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from pathsgd import trace
from pathsgd.bench.methods import ADAMW, METHODS, MOMENTUM, SGD
from pathsgd.console.devices import allow_tf32
from pathsgd.console.networks import small_image_resnet

NAMES = (
    SGD, "PathSGD", MOMENTUM, "PathSGD, momentum", ADAMW, "PathNormalized(AdamW)", "PathAdam", "PathMuon",
)  # fmt: skip
WARM_UP = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    allow_tf32(True)
    x, y = torch.randn(4, 3, 32, 32, device=options.device), torch.arange(4, device=options.device)

    def make(name: str) -> tuple[Callable[[], None], Callable[[], object]] | None:
        torch.manual_seed(0)
        model = small_image_resnet().to(options.device)
        optimizer = METHODS[name].make(model, trace(model, x[:1]))

        def backward() -> None:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()

        return None if optimizer is None else (backward, optimizer.step)

    made = {name: make(name) for name in NAMES}
    runs = {name: own for name, own in made.items() if own is not None}
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    for k in range(WARM_UP + options.steps):
        for name, (backward, step) in runs.items():
            wait()
            start = time.perf_counter()
            backward()
            done = time.perf_counter()
            step()
            left = time.perf_counter()
            wait()
            if k >= WARM_UP:
                times[name].append((done - start, left - done, time.perf_counter() - start))
    for name, own in times.items():
        passes, step_time, whole = (1e3 * statistics.median(column) for column in zip(*own, strict=True))
        print(f"{name:22} passes {passes:6.2f} ms  step {step_time:5.2f} ms  with the wait {whole:6.2f} ms")


if __name__ == "__main__":
    main()
