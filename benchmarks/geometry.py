"""What gamma costs: one forward and one backward pass over the weights, against the network's own.

Ratios are taken in one run, the two timed in turn so that a slow moment hits both. Prints a table;
``--out FILE`` writes the same as JSON. ``--device cuda`` runs on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from memory import kept_bytes, peak_bytes
from torch import Tensor, nn

import pathsgd
from pathsgd.console.networks import GPT, ResNet
from pathsgd.geometry.gamma import measure as measure_network
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.geometry.passes import powered_network
from pathsgd.geometry.range_check import RangeCheck
from pathsgd.geometry.rescale import apply_factors
from pathsgd.graph.unit_classes import unit_classes_of


@dataclass
class Row:
    """One network: medians in milliseconds, memory in megabytes."""

    network: str
    batch: int
    forward_backward_ms: float
    gamma_ms: float
    ratio: float
    target: float | None
    every_place_ms: float
    """gamma with places whose paths are equal computed one by one."""
    gamma_with_exponents_ms: float
    gamma_unbalanced_ms: float
    """The same after every unit is rescaled by up to 2^+-20, so that one exponent does not do for a layer."""
    forward_ms: float
    """The network's own forward pass at batch one."""
    path_norm_ms: float | None
    """None if the network is not one region."""
    parameters_mb: float
    activations_mb: float
    gamma_peak_mb: float
    trace_s: float


def paper_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 4000), nn.ReLU(), nn.Linear(4000, 4000), nn.ReLU(), nn.Linear(4000, 10)
    )  # fmt: skip


def measure(
    network: str, model: nn.Module, x: Tensor, target: float | None, repeats: int, device: torch.device
) -> Row:
    model, x = model.to(device), x.to(device)
    started = time.perf_counter()
    graph = pathsgd.trace(model, x)
    traced = time.perf_counter() - started
    tensors = graph.tensors(model)

    def forward_backward() -> None:
        model.zero_grad()
        model(x).sum().backward()

    def gamma() -> None:
        measure_gammas(graph, tensors, 2)

    @torch.no_grad()
    def every_place() -> None:
        network = powered_network(graph, tensors, 2, folded=False)
        check = RangeCheck(network)
        measure_network(network, check)
        check.passed()

    def with_exponents() -> None:
        measure_gammas(graph, tensors, 2, exponents=True)

    @torch.no_grad()
    def forward() -> None:
        model(one)

    @torch.no_grad()
    def path_norm() -> None:
        pathsgd.path_norm(model, graph)

    model.eval()
    one = x[:1]
    one_region = len(graph.parameter_regions()) == 1
    norms = [
        (timed(forward, device), timed(path_norm, device) if one_region else 0.0) for _ in range(repeats + 2)
    ][2:]
    turns = (forward_backward, gamma, with_exponents)
    rows = [[timed(each, device) for each in turns] for _ in range(repeats + 2)][2:]
    ran, plain, extended = (statistics.median(column) for column in zip(*rows, strict=True))
    every = statistics.median(timed(every_place, device) for _ in range(3))
    peak = peak_bytes(gamma)
    activations = kept_bytes(lambda: model(one))
    rescale_units(graph, tensors)
    unbalanced = statistics.median(timed(with_exponents, device) for _ in range(repeats + 2))
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return Row(
        network=network,
        batch=len(x),
        forward_backward_ms=1e3 * ran,
        gamma_ms=1e3 * plain,
        ratio=plain / ran,
        target=target,
        every_place_ms=1e3 * every,
        gamma_with_exponents_ms=1e3 * extended,
        gamma_unbalanced_ms=1e3 * unbalanced,
        forward_ms=1e3 * statistics.median(a for a, _ in norms),
        path_norm_ms=1e3 * statistics.median(b for _, b in norms) if one_region else None,
        parameters_mb=parameters / 1e6,
        activations_mb=activations / 1e6,
        gamma_peak_mb=peak / 1e6,
        trace_s=traced,
    )


@torch.no_grad()
def rescale_units(graph: pathsgd.PathGraph, tensors: Mapping[str, Tensor]) -> None:
    units = unit_classes_of(graph)
    factors = torch.exp2(torch.randint(-20, 21, (units.count,)).double())
    factors[0] = 1  # what cannot be rescaled
    apply_factors(tensors, units, factors)


def timed(function: Callable[[], None], device: torch.device) -> float:
    synchronise(device)
    started = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - started


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} cores, {platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--repeats", default=15, type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    jobs = [
        ("ResNet-18 shape, 32x32", ResNet(), torch.randn(1, 3, 32, 32), None),
        ("ResNet-18 shape, 224x224", ResNet(), torch.randn(1, 3, 224, 224), 2.5),
        ("GPT-2 124M shape, 128 tokens", GPT(), torch.zeros(1, 128, dtype=torch.int64), 1.0),
        ("784-4000-4000-10", paper_mlp(), torch.randn(100, 784), 0.3),
    ]
    rows = [measure(*job, options.repeats, options.device) for job in jobs]
    print(f"torch {torch.__version__}, {machine(options.device)}")
    print(f"{'network':30}{'batch':>6}{'fwd+bwd ms':>12}{'gamma ms':>10}{'ratio':>7}{'target':>8}"
          f"{'every place ms':>16}{'exponents ms':>14}{'unbalanced ms':>15}{'forward ms':>12}"
          f"{'path norm ms':>14}{'trace s':>9}{'peak MB':>9}{'bound MB':>10}")  # fmt: skip
    for row in rows:
        bound = row.parameters_mb + row.activations_mb
        norm = "" if row.path_norm_ms is None else f"{row.path_norm_ms:.1f}"
        print(f"{row.network:30}{row.batch:6}{row.forward_backward_ms:12.1f}{row.gamma_ms:10.1f}"
              f"{row.ratio:7.2f}{row.target or '':>8}"
              f"{row.every_place_ms:16.1f}{row.gamma_with_exponents_ms:14.1f}"
              f"{row.gamma_unbalanced_ms:15.1f}{row.forward_ms:12.1f}{norm:>14}{row.trace_s:9.2f}"
              f"{row.gamma_peak_mb:9.1f}{bound:10.1f}")  # fmt: skip
    print("bound: the parameters once plus one example's activations")
    if options.out:
        found = {
            "machine": machine(options.device),
            "torch": torch.__version__,
            "load": os.getloadavg()[0],
            "rows": [asdict(row) for row in rows],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
