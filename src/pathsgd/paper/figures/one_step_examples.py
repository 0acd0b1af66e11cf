"""The two small examples of Figure 1, computed: one step of SGD and one of Path-SGD on equivalent networks.

In both the biases are zero, the step size is 1 and the gradient with respect to every output is -1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pathsgd

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SmallNet:
    """The weights of each layer, one row for each unit they lead to, and the outputs."""

    layers: tuple[Matrix, ...]
    outputs: tuple[float, ...]

    @property
    def weights(self) -> list[float]:
        return [weight for layer in self.layers for row in layer for weight in row]


@dataclass(frozen=True)
class BeforeAndAfter:
    """A network before and after one step of each method."""

    before: SmallNet
    sgd: SmallNet
    path: SmallNet


@dataclass(frozen=True)
class OneStepExample:
    """A balanced network, an unbalanced one that computes the same function, and one step of both."""

    x: tuple[float, ...]
    balanced: BeforeAndAfter
    unbalanced: BeforeAndAfter
    sgd_equivalent: bool
    """Whether the two are rescaling equivalent after a step of SGD."""
    path_equivalent: bool

    @property
    def sgd_gap(self) -> float:
        """The largest difference between the outputs of the two after a step of SGD."""
        return _largest_difference(self.balanced.sgd, self.unbalanced.sgd)

    @property
    def path_gap(self) -> float:
        return _largest_difference(self.balanced.path, self.unbalanced.path)

    @property
    def exploded(self) -> bool:
        """Whether SGD blew up a small weight of the unbalanced network and hardly moved a large one."""
        before, after = self.unbalanced.before.weights, self.unbalanced.sgd.weights
        changes = [abs(b / a) for a, b in zip(before, after, strict=True)]
        return max(changes) > 100 and min(changes) < 1.01

    def __str__(self) -> str:
        parts = []
        for name, nets in (("unbalanced", self.unbalanced), ("balanced", self.balanced)):
            before, sgd, path = (
                " and ".join(f"{w:.5g}" for w in net.weights) for net in (nets.before, nets.sgd, nets.path)
            )
            parts.append(
                f"{name}, the weights {before} become {sgd} in one step of SGD, {path} in one of Path-SGD"
            )
        return "; ".join(parts)


@functools.cache  # asked for by the claim and by the figure
def explosion() -> OneStepExample:
    """Figure 1 (b): a chain of one unit, x = 1.

    >>> found = explosion()
    >>> found.unbalanced.before.weights, found.unbalanced.sgd.weights
    ([100.0, 0.01], [100.01, 100.01])
    """
    return _compute([[1.0]], [[1.0]], factors=[100.0], x=[1.0])


@functools.cache
def poor_updates() -> OneStepExample:
    """Figure 1 (c): two inputs, two hidden units, two outputs, x = (1, 1).

    >>> found = poor_updates()
    >>> found.balanced.sgd.outputs, found.unbalanced.sgd.outputs
    ((52.0, 60.0), (829.15, 831.21))
    """
    return _compute([[1.0, 1.0], [1.0, 2.0]], [[1.0, 1.0], [2.0, 1.0]], factors=[10.0, 0.1], x=[1.0, 1.0])


def _compute(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], factors: list[float], x: list[float]
) -> OneStepExample:
    w1, w2, c, inputs = (torch.tensor(v, dtype=torch.float64) for v in (first, second, factors, [x]))
    # Divided by the factor rather than multiplied by its inverse: 1 / 100 is then the nearest float to it.
    starts = {"balanced": (w1, w2), "unbalanced": (w1 * c[:, None], w2 / c)}
    methods = ("before", "sgd", "path")
    models = {(s, m): _step(_make_model(*starts[s]), inputs, m) for s in starts for m in methods}
    balanced, unbalanced = (
        BeforeAndAfter(*(_describe(models[s, m], inputs) for m in methods)) for s in starts
    )
    sgd, path = (
        bool(pathsgd.rescaling_equivalent(models["balanced", m], models["unbalanced", m]))
        for m in ("sgd", "path")
    )
    return OneStepExample(tuple(x), balanced, unbalanced, sgd, path)


def _make_model(w1: Tensor, w2: Tensor) -> nn.Sequential:
    first, second = (nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype) for w in (w1, w2))
    first.weight.data, second.weight.data = w1.clone(), w2.clone()
    return nn.Sequential(first, nn.ReLU(), second)


def _step(model: nn.Sequential, inputs: Tensor, method: str) -> nn.Sequential:
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
def _describe(model: nn.Sequential, inputs: Tensor) -> SmallNet:
    layers = tuple(tuple(map(tuple, p.tolist())) for p in model.parameters())
    return SmallNet(layers, tuple(model(inputs)[0].tolist()))


def _largest_difference(a: SmallNet, b: SmallNet) -> float:
    return max(abs(one - other) for one, other in zip(a.outputs, b.outputs, strict=True))
