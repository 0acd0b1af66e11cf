"""The time of ``pathsgd.balance`` on a ResNet-50 and a GPT-2 of 12 x 768: tracing, finding units, balancing.

python -m benchmarks.balance_time [cpu|cuda]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import pathsgd
from pathsgd.console.devices import device_name
from pathsgd.console.networks import resnet50
from pathsgd.graph.unit_classes import unit_classes_of

OUT = Path(__file__).resolve().parent.parent / "results" / "balance"


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "ResNet-50, 224x224": (resnet50, torch.zeros(1, 3, 224, 224)),
    "GPT-2, 12 x 768": (gpt2, torch.zeros(1, 64, dtype=torch.long)),
}


def measure(build: Callable[[], nn.Module], x: Tensor, device: torch.device) -> dict[str, float]:
    """Seconds, the least of three."""
    found: list[dict[str, float]] = []
    for _ in range(3):
        model = build().to(device)
        times = [time.perf_counter()]
        graph = pathsgd.trace(model, x.to(device))
        times.append(time.perf_counter())
        unit_classes_of(graph)
        times.append(time.perf_counter())
        pathsgd.balance(model, graph)
        times.append(time.perf_counter())
        pathsgd.unbalance(model, graph)
        start = time.perf_counter()
        pathsgd.balance(model, graph)
        unbalanced = time.perf_counter() - start
        traced, units, balanced = (b - a for a, b in pairwise(times))
        found.append({"trace": traced, "units": units, "balance": balanced, "unbalanced": unbalanced})
    return {name: round(min(own[name] for own in found), 3) for name in found[0]}


def main() -> None:
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    found: dict[str, object] = {"machine": device_name(device), "torch": torch.__version__}
    for name, (build, x) in CASES.items():
        found[name] = measure(build, x, device)
        print(name, found[name], flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"time-{device.type}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
