"""The two small examples of Figure 1, computed: one step of SGD and one of Path-SGD on equivalent networks.

In both the thresholds are zero, the step size is 1 and the gradient with respect to every output is -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pathsgd

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Net:
    """Weights of each layer, one row for each unit they lead to, and the outputs for the example's input."""

    layers: tuple[Matrix, ...]
    outputs: tuple[float, ...]

    @property
    def weights(self) -> list[float]:
        return [weight for layer in self.layers for row in layer for weight in row]


@dataclass(frozen=True)
class Steps:
    """A network before and after one step of each method."""

    before: Net
    sgd: Net
    path: Net


@dataclass(frozen=True)
class Example:
    """A balanced network, an unbalanced one that computes the same, and what one step makes of both."""

    x: tuple[float, ...]
    scales: tuple[float, ...]
    """What the hidden units of the balanced network were rescaled by."""
    balanced: Steps
    unbalanced: Steps
    sgd_equivalent: bool
    """Whether the two are rescaling equivalent after a step of SGD."""
    path_equivalent: bool

    @property
    def sgd_gap(self) -> float:
        """The largest difference between the outputs of the two after a step of SGD."""
        return _gap(self.balanced.sgd, self.unbalanced.sgd)

    @property
    def path_gap(self) -> float:
        """The same for Path-SGD."""
        return _gap(self.balanced.path, self.unbalanced.path)

    @property
    def exploded(self) -> bool:
        """Whether SGD blew up a small weight of the unbalanced network and hardly moved a large one."""
        before, after = self.unbalanced.before.weights, self.unbalanced.sgd.weights
        changes = [abs(b / a) for a, b in zip(before, after, strict=True)]
        return max(changes) > 100 and min(changes) < 1.01

    def __str__(self) -> str:
        listed = {
            name: [" and ".join(f"{w:.5g}" for w in net.weights) for net in (own.before, own.sgd, own.path)]
            for name, own in (("unbalanced", self.unbalanced), ("balanced", self.balanced))
        }
        return "; ".join(
            f"{name}, the weights {before} become {sgd} in one step of SGD, {path} in one of Path-SGD"
            for name, (before, sgd, path) in listed.items()
        )


def explosion() -> Example:
    """Figure 1 (b): a chain of one unit, x = 1.

    >>> found = explosion()
    >>> found.unbalanced.before.weights, found.unbalanced.sgd.weights
    ([100.0, 0.01], [100.01, 100.01])
    """
    return _example([[[1.0]], [[1.0]]], scales=[100.0], x=[1.0])


def poor_updates() -> Example:
    """Figure 1 (c): two inputs, two hidden units, two outputs, x = (1, 1).

    >>> found = poor_updates()
    >>> found.balanced.sgd.outputs, found.unbalanced.sgd.outputs
    ((52.0, 60.0), (829.15, 831.21))
    """
    return _example([[[1.0, 1.0], [1.0, 2.0]], [[1.0, 1.0], [2.0, 1.0]]], scales=[10.0, 0.1], x=[1.0, 1.0])


def _example(weights: Sequence[Sequence[Sequence[float]]], scales: list[float], x: list[float]) -> Example:
    first, second = (torch.tensor(layer, dtype=torch.float64) for layer in weights)
    by = torch.tensor(scales, dtype=torch.float64)
    inputs = torch.tensor([x], dtype=torch.float64)
    # Divided by the scale rather than multiplied by its inverse: 1 / 100 is then the nearest float to it.
    layers = {"balanced": (first, second), "unbalanced": (first * by[:, None], second / by)}
    models = {
        (name, method): _stepped(_network(own), inputs, method)
        for name, own in layers.items()
        for method in ("before", "sgd", "path")
    }
    balanced, unbalanced = (
        Steps(*(_net(models[name, method], inputs) for method in ("before", "sgd", "path")))
        for name in layers
    )
    sgd, path = (
        bool(pathsgd.rescaling_equivalent(models["balanced", m], models["unbalanced", m]))
        for m in ("sgd", "path")
    )
    return Example(tuple(x), tuple(scales), balanced, unbalanced, sgd, path)


def _network(layers: Sequence[Tensor]) -> nn.Sequential:
    first, second = (nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype) for w in layers)
    with torch.no_grad():
        first.weight.copy_(layers[0])
        second.weight.copy_(layers[1])
    return nn.Sequential(first, nn.ReLU(), second)


def _stepped(model: nn.Sequential, inputs: Tensor, method: str) -> nn.Sequential:
    """The same model after one step."""
    if method != "before":
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(model.parameters(), lr=1.0) if method == "sgd" else pathsgd.PathSGD(model, lr=1.0)
        )
        outputs = model(inputs)
        outputs.backward(-torch.ones_like(outputs))
        optimizer.step()
    return model


@torch.no_grad()
def _net(model: nn.Sequential, inputs: Tensor) -> Net:
    layers = tuple(tuple(map(tuple, p.tolist())) for p in model.parameters())
    return Net(layers, tuple(model(inputs)[0].tolist()))


def _gap(a: Net, b: Net) -> float:
    return max(abs(one - other) for one, other in zip(a.outputs, b.outputs, strict=True))
