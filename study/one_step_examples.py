"""The two small examples of Figure 1, computed: one step of SGD and one of Path-SGD on equivalent networks.

In both the biases are zero, the step size is 1 and the gradient with respect to every output is -1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

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

    @property
    def sgd_gap(self) -> float:
        """Largest difference between the outputs of the two after a step of SGD."""
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
            texts = (" and ".join(f"{w:.5g}" for w in n.weights) for n in (nets.before, nets.sgd, nets.path))
            before, sgd, path = texts
            after = f"become {sgd} in one step of SGD, {path} in one of Path-SGD"
            parts.append(f"{name}, the weights {before} {after}")
        return "; ".join(parts)


@functools.cache  # asked for by the claim and by the figure
def explosion() -> OneStepExample:
    """Figure 1 (b): a chain of one unit, x = 1.

    >>> nets = explosion().unbalanced
    >>> nets.before.weights, nets.sgd.weights
    ([100.0, 0.01], [100.01, 100.01])
    """
    return _compute([[1.0]], [[1.0]], factors=[100.0], x=[1.0])


@functools.cache
def poor_updates() -> OneStepExample:
    """Figure 1 (c): two inputs, two hidden units, two outputs, x = (1, 1).

    >>> poor_updates().balanced.sgd.outputs, poor_updates().unbalanced.sgd.outputs
    ((52.0, 60.0), (829.15, 831.21))
    """
    return _compute([[1.0, 1.0], [1.0, 2.0]], [[1.0, 1.0], [2.0, 1.0]], factors=[10.0, 0.1], x=[1.0, 1.0])


def _compute(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], factors: list[float], x: list[float]
) -> OneStepExample:
    w1, w2, c, inputs = (torch.tensor(v, dtype=torch.float64) for v in (first, second, factors, [x]))

    def take_steps(w1: Tensor, w2: Tensor) -> BeforeAndAfter:
        return BeforeAndAfter(*(_step(w1, w2, inputs, method) for method in ("before", "sgd", "path")))

    # Divided by the factor rather than multiplied by its inverse: 1 / 100 is then the nearest float to it.
    return OneStepExample(tuple(x), take_steps(w1, w2), take_steps(w1 * c[:, None], w2 / c))


def _step(w1: Tensor, w2: Tensor, inputs: Tensor, method: str) -> SmallNet:
    """Network after one step of a method, or before it."""
    first, second = (nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype) for w in (w1, w2))
    first.weight.data, second.weight.data = w1.clone(), w2.clone()
    model = nn.Sequential(first, nn.ReLU(), second)
    if method != "before":
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(model.parameters(), lr=1.0) if method == "sgd" else PathSGD(model, lr=1.0)
        )
        outputs = model(inputs)
        outputs.backward(-torch.ones_like(outputs))
        optimizer.step()
    layers = tuple(tuple(map(tuple, p.tolist())) for p in model.parameters())
    return SmallNet(layers, tuple(model(inputs)[0].tolist()))


def _largest_difference(a: SmallNet, b: SmallNet) -> float:
    return max(abs(one - other) for one, other in zip(a.outputs, b.outputs, strict=True))
