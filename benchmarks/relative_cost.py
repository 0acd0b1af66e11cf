"""What a relative step costs: whole training steps of BalancedMuon and PathMuon beside Muon's and AdamW's.

Each eagerly, as in an ordinary loop; with the user's whole step as one CUDA graph; and the optimizer alone,
eagerly. One run, the methods in turn, medians; and the peak of memory, and the time it takes to make the
optimizer once the model is traced. Muon is the plain one with the same orthogonalisation. Writes
results/optim/relative-cost-DEVICE.json.

    python -m benchmarks.relative_cost [cpu|cuda]
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathsgd
from benchmarks.transfer.networks import GPT, NETWORKS
from pathsgd._torch import foreach
from pathsgd.console.devices import device_name
from pathsgd.console.muon import hidden_matrices
from pathsgd.console.networks import small_image_resnet, stack
from pathsgd.console.timing import capture, median_us
from pathsgd.optim.relative.muon import orthogonalize_all

OUT = Path(__file__).resolve().parent.parent / "results" / "optim"
RATE = 1e-6
Make = Callable[[nn.Module, pathsgd.PathGraph], torch.optim.Optimizer]


def _images(count: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32), torch.randint(classes, (count,))


def _points() -> tuple[Tensor, Tensor]:
    return torch.randn(100, 784), torch.randint(10, (100,))


def _tokens(count: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(256, (count, length)), torch.randint(256, (count, length))


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised as ours is, and fused AdamW for what is not a hidden matrix."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        matrices = hidden_matrices(model)
        chosen = set(map(id, matrices))
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self.adamw = torch.optim.AdamW(rest, lr, fused=True, capturable=rest[0].is_cuda)
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
        foreach("mul_", buffers, 0.95)
        foreach("add_", buffers, grads)
        steps = orthogonalize_all(foreach("add", grads, buffers, alpha=0.95))
        foreach("add_", params, steps, alpha=-self.param_groups[0]["lr"])
        self.adamw.step()


Batch = Callable[[], tuple[Tensor, Tensor]]
IMAGES: Batch = functools.partial(_images, 128)
CASES: dict[str, tuple[Callable[[], nn.Module], Batch, str]] = {
    "784-256-256-10, batch 100, tf32": (functools.partial(stack, 784, 256, 256, 10), _points, "tf32"),
    "ResNet-18, 32x32, batch 128, tf32": (small_image_resnet, IMAGES, "tf32"),
    "VGG of 48 channels, batch 128, tf32": (NETWORKS["vgg-48"].build, IMAGES, "tf32"),
    "MLP 3 x 2048, batch 128, tf32": (NETWORKS["mlp-2048x3"].build, IMAGES, "tf32"),
    "GPT 4 x 512, 64 x 128 tokens, tf32": (
        NETWORKS["gpt-512"].build, functools.partial(_tokens, 64, 128), "tf32"
    ),
    "GPT 12 x 768, 32 x 256 tokens, bf16": (
        functools.partial(GPT, 768, 12, 256), functools.partial(_tokens, 32, 256), "bf16"
    ),
}  # fmt: skip


CPU_CASES: dict[str, tuple[Callable[[], nn.Module], Batch, str]] = {
    "784-256-256-10, batch 100": (functools.partial(stack, 784, 256, 256, 10), _points, "fp32"),
    "VGG of 48 channels, batch 32": (NETWORKS["vgg-48"].build, functools.partial(_images, 32), "fp32"),
    "GPT 4 x 128, 16 x 64 tokens": (
        functools.partial(GPT, 128, 4, 64), functools.partial(_tokens, 16, 64), "fp32"
    ),
    "ResNet-18, 32x32, batch 32": (small_image_resnet, functools.partial(_images, 32), "fp32"),
}  # fmt: skip


def methods(on_gpu: bool) -> dict[str, Make]:
    return {
        "AdamW, fused": lambda m, g: torch.optim.AdamW(m.parameters(), RATE, fused=True, capturable=on_gpu),
        "Muon": lambda m, g: Muon(m, RATE),
        "PathMuon": lambda m, g: pathsgd.PathMuon(m, g, RATE),
        "BalancedMuon": lambda m, g: pathsgd.BalancedMuon(m, g, RATE),
    }


def measure(case: str, device: torch.device, seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds by way and method."""
    build, batch, precision = (CASES | CPU_CASES)[case]
    torch.manual_seed(0)
    x, y = (t.to(device) for t in batch())
    eager, captured, alone, memory, making = {}, {}, {}, {}, {}
    graph = pathsgd.trace(build().to(device), x[:1])
    for name, make in methods(device.type == "cuda").items():
        model = build().to(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        began = time.perf_counter()
        optimizer = make(model, graph)
        making[name] = (time.perf_counter() - began) * 1e6

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                outputs = model(x)
            F.cross_entropy(outputs.float().flatten(0, -2), y.flatten()).backward()
            optimizer.step()

        for _ in range(10 if device.type == "cuda" else 2):
            step()
        memory[name] = (torch.cuda.max_memory_allocated() - held) / 2**20
        eager[name], alone[name] = step, optimizer.step
        if device.type == "cuda":
            captured[name] = capture(step, device)
    ways = {"eager": eager, "alone": alone, "one CUDA graph": captured}
    # Captured last: gradients then lie in the graphs' memory.
    times = {way: median_us(steps, seconds, device) for way, steps in ways.items() if steps}
    return times | {"making it": making} | ({"MiB": memory} if device.type == "cuda" else {})


def main() -> None:
    device = torch.device(
        sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    found: dict[str, object] = {"machine": device_name(device), "torch": torch.__version__}
    on_gpu = device.type == "cuda"
    for case in CASES if on_gpu else CPU_CASES:
        found[case] = times = measure(case, device, 0.4 if on_gpu else 5)
        print(case)
        for way, own in times.items():
            scale, unit = (1, "MiB") if way == "MiB" else (1e3, "ms")
            text = ", ".join(f"{name} {value / scale:.2f} {unit}" for name, value in own.items())
            ratio = own["BalancedMuon"] / own["Muon"]
            print(f"  {way}: {text}; BalancedMuon to Muon {ratio:.3f}", flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"relative-cost-{device.type}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
