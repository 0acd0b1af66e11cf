"""One network, its rescaled copy, and who can tell them apart. Run by ``make demo``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import pathsgd

STEPS = 50


def network() -> nn.Sequential:
    """A small conv net with batch norm: the kind of network whose units are channels."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip


def data() -> tuple[Tensor, Tensor]:
    """Bars in noise: which of four places is bright?"""
    labels = torch.arange(256) % 4
    images = 0.5 * torch.randn(256, 1, 8, 8, dtype=torch.float64)
    for k, label in enumerate(labels):
        images[k, 0, 2 * label : 2 * label + 2] += 1
    return images, labels


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> list[float]:
    """The loop anyone writes; only the optimizer differs."""
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    # eval(): batch norm by its running statistics, so that one function is trained, not one per batch.
    model = network().double().eval()
    images, labels = data()
    graph = pathsgd.trace(model, images)
    print(graph, end="\n\n")

    copied = copy.deepcopy(model)
    pathsgd.unbalance(copied, graph, generator=torch.Generator().manual_seed(1))
    print("A copy, after the paper's random rescaling of a quarter of its units:", end="\n\n")
    print(f"{'':34}{'network':>14}{'its copy':>14}")
    gap = (model(images) - copied(images)).abs().max().item()
    print(f"{'largest difference of outputs':34}{'':14}{gap:14.1e}")
    for p in (1, 2, math.inf):
        row = [pathsgd.path_norm(m, graph, p).item() for m in (model, copied)]
        print(f"{f'path norm phi_{p}':34}" + "".join(f"{x:14.6f}" for x in row))
    row = [pathsgd.group_norm(m, graph).item() for m in (model, copied)]
    print(f"{'largest unit norm mu_2,inf':34}" + "".join(f"{x:14.6f}" for x in row))

    print(
        f"\nThe cross-entropy of both over {STEPS} steps (fp64, batch norm by its running statistics; SGD at"
    )
    print("step size 0.1, Path-SGD at 0.01):", end="\n\n")
    optimizers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        "Path-SGD": lambda m: pathsgd.PathSGD(m, graph, lr=0.01),
    }
    for name, optimizer in optimizers.items():
        trained = [copy.deepcopy(m) for m in (model, copied)]
        curves = [train(m, optimizer(m), images, labels) for m in trained]
        for step in (0, STEPS // 2, STEPS - 1):
            row = [curve[step] for curve in curves]
            print(f"{f'{name}, step {step}':34}" + "".join(f"{x:14.6f}" for x in row))
        apart = max(abs(a - b) for a, b in zip(*curves, strict=True))
        if apart < 1e-6:
            print(f"  {name} cannot tell them apart: the curves agree to {apart:.1e}\n")
        else:
            worst = max(curves[1])
            print(f"  {name} tells them apart: on the copy the loss reached {worst:.1e} on the way\n")

    reached = pathsgd.balance(copied, graph)
    gap = (model(images) - copied(images)).abs().max().item()
    print(f"balance() takes the copy's mu_2,inf to {reached:.6f}, the least any equivalent has;")
    print(f"its outputs are still the network's, to {gap:.1e}.")


if __name__ == "__main__":
    main()
