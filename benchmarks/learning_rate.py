"""Which lr works for the plain forms: PathSGD beside SGD on the paper's network (MNIST) and on a small ResNet
(CIFAR-10). Relative steps: python -m benchmarks.transfer.

    python benchmarks/learning_rate.py DATA [--epochs 3] [--json FILE]

DATA holds MNIST/raw/*.gz and cifar-10-batches-bin/*.bin as their homes publish them (of the latter any
number of batches). Training loss over the last epoch and test error after it, for lr = 1e-4 to 0.1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from pathsgd import PathNormalized, PathSGD
from pathsgd.console.networks import ResNet

Data = tuple[Tensor, Tensor, Tensor, Tensor]
Maker = Callable[[nn.Module, Tensor, float], torch.optim.Optimizer]

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
METHODS: dict[str, Maker] = {
    "PathSGD": lambda m, x, lr: PathSGD(m, x, lr=lr),
    "PathSGD, momentum 0.9": lambda m, x, lr: PathSGD(m, x, lr=lr, momentum=0.9),
    "PathNormalized(Adam)": lambda m, x, lr: PathNormalized(torch.optim.Adam, m, x, lr=lr),
    "SGD": lambda m, _, lr: torch.optim.SGD(m.parameters(), lr=lr),
    "SGD, momentum 0.9": lambda m, _, lr: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9),
    "Adam": lambda m, _, lr: torch.optim.Adam(m.parameters(), lr=lr),
}


def mnist(folder: Path) -> Data:
    def read(name: str, header: int) -> Tensor:
        raw = gzip.decompress((folder / "MNIST" / "raw" / f"{name}-ubyte.gz").read_bytes())
        return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8)

    return centred(
        read("train-images-idx3", 16).reshape(-1, 784), read("train-labels-idx1", 8),
        read("t10k-images-idx3", 16).reshape(-1, 784), read("t10k-labels-idx1", 8),
    )  # fmt: skip


def cifar10(folder: Path) -> Data:
    def read(pattern: str) -> tuple[Tensor, Tensor]:
        files = sorted((folder / "cifar-10-batches-bin").glob(pattern))
        raw = torch.cat([torch.frombuffer(bytearray(f.read_bytes()), dtype=torch.uint8) for f in files])
        rows = raw.reshape(-1, 3073)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]

    return centred(*read("data_batch_*.bin"), *read("test_batch.bin"))


def centred(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Data:
    x, x_test = x / 255, x_test / 255
    mean = x.mean(0)
    return x - mean, y.long(), x_test - mean, y_test.long()


def paper_network() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(784, 4000), nn.ReLU(), nn.Linear(4000, 4000), nn.ReLU(), nn.Linear(4000, 10)
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
    return model


def small_resnet() -> nn.Module:
    """Three stages of 16, 32 and 64 channels with a stem for small images."""
    model = ResNet(16, (1, 1, 1), 10)
    model.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True))
    return model


def train(model: nn.Module, data: Data, make: Maker, lr: float, epochs: int) -> tuple[float, float]:
    """(training loss over the last epoch, test error after it)."""
    x, y, x_test, y_test = data
    optimizer = make(model, x[:1], lr)
    total = math.inf
    for _ in range(epochs):
        order = torch.randperm(len(x), device=x.device)
        losses = []
        model.train()
        for k in order.split(100):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[k]), y[k])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        total = torch.stack(losses).mean().item()
        if not math.isfinite(total):
            break
    model.eval()
    with torch.no_grad():
        wrong = sum(
            (model(a).argmax(1) != b).sum().item()
            for a, b in zip(x_test.split(1000), y_test.split(1000), strict=True)
        )
    return total, wrong / len(x_test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    rows = []
    networks = {
        "784-4000-4000-10, MNIST": (paper_network, mnist),
        "small ResNet, CIFAR-10": (small_resnet, cifar10),
    }
    for name, (network, load) in networks.items():
        data: Data = tuple(t.to(device) for t in load(options.data))  # type: ignore[assignment]
        for method in options.methods:
            for lr in RATES:
                torch.manual_seed(0)
                loss, error = train(network().to(device), data, METHODS[method], lr, options.epochs)
                rows.append({"network": name, "method": method, "lr": lr, "loss": loss, "error": error})
                print(f"{name:28}{method:24}lr {lr:<8g}loss {loss:<10.4f}test error {error:.4f}", flush=True)
                if options.json:
                    head = {"machine": machine, "torch": torch.__version__, "epochs": options.epochs,
                            "training images": len(data[0])}  # fmt: skip
                    options.json.write_text(json.dumps({**head, "runs": rows}, indent=1))


if __name__ == "__main__":
    main()
