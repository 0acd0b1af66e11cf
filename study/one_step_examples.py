"""The two small examples of Figure 1, computed: one step of SGD and one of Path-SGD on equivalent networks.

In both the biases are zero, the step size is 1 and the gradient with respect to every output is -1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd import PathSGD

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
class OneStepExample:
    """A balanced network, an unbalanced one that computes the same function, and both after one step."""

    x: tuple[float, ...]
    balanced: tuple[SmallNet, SmallNet, SmallNet]  # before, after a step of SGD, after one of Path-SGD
    unbalanced: tuple[SmallNet, SmallNet, SmallNet]

    @property
    def gaps(self) -> list[float]:
        """Largest difference between the outputs of the two, before and after a step of each method."""
        pairs = zip(self.balanced, self.unbalanced, strict=True)
        return [max(abs(a - b) for a, b in zip(one.outputs, two.outputs, strict=True)) for one, two in pairs]

    @property
    def exploded(self) -> bool:
        """Whether SGD blew up a small weight of the unbalanced network and hardly moved a large one."""
        before, after, _ = (net.weights for net in self.unbalanced)
        changes = [abs(b / a) for a, b in zip(before, after, strict=True)]
        return max(changes) > 100 and min(changes) < 1.01

    def __str__(self) -> str:
        parts = []
        for name, nets in (("unbalanced", self.unbalanced), ("balanced", self.balanced)):
            before, sgd, path = (" and ".join(f"{w:.5g}" for w in net.weights) for net in nets)
            after = f"become {sgd} in one step of SGD, {path} in one of Path-SGD"
            parts.append(f"{name}, the weights {before} {after}")
        return "; ".join(parts)


@functools.cache  # asked for by the claim and by the figure
def explosion() -> OneStepExample:
    """Figure 1 (b): a chain of one unit, x = 1."""
    return _compute([[1.0]], [[1.0]], factors=[100.0], x=[1.0])


@functools.cache
def poor_updates() -> OneStepExample:
    """Figure 1 (c): two inputs, two hidden units, two outputs, x = (1, 1)."""
    return _compute([[1.0, 1.0], [1.0, 2.0]], [[1.0, 1.0], [2.0, 1.0]], factors=[10.0, 0.1], x=[1.0, 1.0])


def _compute(first: Any, second: Any, factors: list[float], x: list[float]) -> OneStepExample:
    w1, w2, c, inputs = (torch.tensor(v, dtype=torch.float64) for v in (first, second, factors, [x]))

    def step(w1: Tensor, w2: Tensor, method: str) -> SmallNet:
        layers = [nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype) for w in (w1, w2)]
        layers[0].weight.data, layers[1].weight.data = w1.clone(), w2.clone()
        model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        if method:
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            outputs = model(inputs)
            outputs.backward(-torch.ones_like(outputs))
            (sgd if method == "sgd" else PathSGD(model, lr=1.0)).step()
        weights = tuple(tuple(map(tuple, p.tolist())) for p in model.parameters())
        return SmallNet(weights, tuple(model(inputs)[0].tolist()))

    def take_steps(w1: Tensor, w2: Tensor) -> tuple[SmallNet, SmallNet, SmallNet]:
        return step(w1, w2, ""), step(w1, w2, "sgd"), step(w1, w2, "path")

    # Divided by the factor rather than multiplied by its inverse: 1 / 100 is then the nearest float to it.
    return OneStepExample(tuple(x), take_steps(w1, w2), take_steps(w1 * c[:, None], w2 / c))
