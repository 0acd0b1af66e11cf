"""What FSDP2 changes and costs: 200 steps of a GPT of 12 x 768 on one GPU, plain and by ``fully_shard``.

The same initial weights and batches each time. A step of a plain model is taken by Triton kernels where there
are some, and captured in a CUDA graph ("plain"); of a sharded one always in ordinary operations in a loop, so
that PathAdam and PathMuon are trained like that without FSDP2, too ("reference"): to the same bits. AdamW and
Muon are those of torch; AdamW's reference is its other implementation, which shows how far rounding alone
takes 200 steps apart.

    torchrun --nproc-per-node 1 -m benchmarks.fsdp2_cost [--small] [--steps N] [--batch N]
        [--precision bf16|tf32|fp32|fp64] [--methods AdamW PathAdam Muon PathMuon] [--out FILE]

Prints a table and writes it to a file. ``--small`` is for a CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pathsgd
from benchmarks.transfer.networks import GPT
from benchmarks.transfer.tasks import Text, text
from pathsgd.console.devices import allow_tf32, device_name
from pathsgd.console.muon import hidden_matrices
from pathsgd.graph.path_graph import PathGraph
from pathsgd.optim import gamma_cache

WARM_UP_BEFORE_CAPTURE = gamma_cache.WARM_UP
WARM_UP = 5
"""Steps that are not timed: kernels are compiled, graphs captured."""


class TorchMuon:
    """torch's Muon for hidden matrices, its AdamW for the rest."""

    def __init__(self, model: nn.Module) -> None:
        matrices = hidden_matrices(model)
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self.both = (
            torch.optim.Muon(matrices, 0.02, weight_decay=0.0),
            torch.optim.AdamW(rest, 1e-3, fused=True),
        )

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()


Make = Callable[[nn.Module, PathGraph], "torch.optim.Optimizer | TorchMuon"]
METHODS: dict[str, tuple[Make, Make | None]] = {
    "AdamW": (
        lambda m, g: torch.optim.AdamW(m.parameters(), 3e-4, fused=True),
        lambda m, g: torch.optim.AdamW(m.parameters(), 3e-4, foreach=True),
    ),
    "PathAdam": (
        lambda m, g: pathsgd.PathAdam(m, g),
        lambda m, g: pathsgd.PathAdam(m, g, implementation="reference"),
    ),
    "Muon": (lambda m, g: TorchMuon(m), None),
    "PathMuon": (
        lambda m, g: pathsgd.PathMuon(m, g),
        lambda m, g: pathsgd.PathMuon(m, g, implementation="reference"),
    ),
}
"""As usual, and without kernels where there are some."""


class Run(NamedTuple):
    """Of one training: losses by step, milliseconds of a step and of the optimizer in it, peak memory."""

    losses: Tensor
    step_ms: float
    optimizer_ms: float
    gigabytes: float


class Clock:
    """Moments on the device, where it has a clock of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.moments = device, []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.moments.append(event)
        else:
            self.moments.append(time.perf_counter())

    def ms(self, start: int, stop: int) -> float:
        begin, end = self.moments[start], self.moments[stop]
        return begin.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - begin)


def shard(model: GPT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(model: nn.Module, optimizer, data: Text, precision: str) -> Run:
    device, losses, clock = data.train.device, [], Clock(data.train.device)
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    generator = torch.Generator(device).manual_seed(1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock.mark()
    for x, y in data.epoch(generator):
        optimizer.zero_grad()
        # The backward pass of attention adds up in no fixed order otherwise, in fp32 even then but by matrix
        # products: losses are compared bit by bit.
        torch.use_deterministic_algorithms(True, warn_only=True)
        with nullcontext() if precision == "bf16" else sdpa_kernel(SDPBackend.MATH):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                outputs = model(x)
            loss = F.cross_entropy(outputs.to(dtype).flatten(0, 1), y.flatten())
            loss.backward()
        torch.use_deterministic_algorithms(False)
        clock.mark()
        optimizer.step()
        clock.mark()
        losses.append(loss.detach())
    found = torch.stack(losses).cpu()  # waits for the device
    timed = range(2 * min(WARM_UP, data.steps - 1), 2 * data.steps, 2)
    return Run(
        found,
        statistics.median(clock.ms(k, k + 2) for k in timed),
        statistics.median(clock.ms(k + 1, k + 2) for k in timed),
        torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0,
    )


def compare(data: Text, width: int, layers: int, precision: str, methods: Sequence[str]) -> list[str]:
    """The lines of the table."""

    dtype = torch.float64 if precision == "fp64" else torch.float32

    def make() -> GPT:
        torch.manual_seed(0)
        return GPT(width, layers, data.context).to(data.train.device, dtype)

    graph = pathsgd.trace(make(), data.example)
    lines = [
        "| | | ms a step | of it the optimizer | peak GB | last loss | losses, largest difference to |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in methods:
        make_optimizer, make_reference = METHODS[name]
        ways = {"plain": make_optimizer, "reference": make_reference, "FSDP2": make_optimizer}
        runs: dict[str, Run] = {}
        for way, optimizer_of in ways.items():
            if optimizer_of is None:
                continue
            gamma_cache.WARM_UP = math.inf if way == "reference" else WARM_UP_BEFORE_CAPTURE
            model = shard(make()) if way == "FSDP2" else make()
            run = runs[way] = train(model, optimizer_of(model, graph), data, precision)
            gaps = [
                f"{other} {(run.losses - before.losses).abs().max():.1e}"
                for other, before in runs.items()
                if other != way
            ]
            row = f"{run.step_ms:.2f}", f"{run.optimizer_ms:.2f}", f"{run.gigabytes:.2f}"
            cells = (name, way, *row, f"{run.losses[-1]:.4f}", ", ".join(gaps))
            lines.append("| " + " | ".join(cells) + " |")
            if dist.get_rank() == 0:
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", action="store_true", help="2 layers of 32, 6 steps")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--precision", choices=("bf16", "tf32", "fp32", "fp64"), default="bf16")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    torch.utils.deterministic.fill_uninitialized_memory = False
    allow_tf32(chosen.precision in ("bf16", "tf32"))
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)

    width, layers, context = (32, 2, 16) if chosen.small else (768, 12, 256)
    batch, steps = chosen.batch or (4 if chosen.small else 32), chosen.steps or (6 if chosen.small else 200)
    data = text(str(device), context=context, batch=batch, steps=steps)
    start = time.perf_counter()
    table = compare(data, width, layers, chosen.precision, chosen.methods)
    title = (
        f"GPT {layers} x {width}, {batch} x {context} bytes a step, {steps} steps, {chosen.precision}; "
        f"{dist.get_world_size()} rank, {device_name(device)}, torch {torch.__version__}; "
        f"{time.perf_counter() - start:.0f} s in all"
    )
    if dist.get_rank() == 0:
        lines = "\n".join([title, "", *table, ""])
        print(lines)
        if chosen.out is not None:
            chosen.out.write_text(lines)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
