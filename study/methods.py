"""Optimizers that a study compares, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from pathsgd import PathError, PathGraph, PathNormalized, PathSGD

Make = Callable[[nn.Module, PathGraph, float, float], Any]  # (model, its graph, lr, p) -> an optimizer


@dataclass(frozen=True)
class Method:
    label: str
    make: Make
    invariant: bool = False  # whether a rescaling of the network changes nothing


def _torch(kind: type[Optimizer], **options: Any) -> Make:
    return lambda m, g, lr, p: kind(m.parameters(), lr=lr, **options, **_for_device(kind, m))  # type: ignore[call-arg]


def _normalized(kind: type[Optimizer]) -> Make:
    return lambda m, g, lr, p: PathNormalized(kind, m, g, p=p, lr=lr, **_for_device(kind, m))


def _for_device(kind: type[Optimizer], model: nn.Module) -> dict[str, Any]:
    """Picks torch's fused form, which Adagrad has on a CPU only."""
    return {"fused": None if kind is torch.optim.Adagrad and next(model.parameters()).is_cuda else True}


def _path_sgd(**options: Any) -> Make:
    return lambda m, g, lr, p: PathSGD(m, g, lr=lr, p=p, **options)


METHODS: dict[str, Method] = {
    "sgd": Method("SGD", _torch(torch.optim.SGD)),
    "adagrad": Method("AdaGrad", _torch(torch.optim.Adagrad)),
    "path-sgd": Method("Path-SGD", _path_sgd(), invariant=True),
    "momentum": Method("SGD, momentum 0.9", _torch(torch.optim.SGD, momentum=0.9)),
    "adam": Method("Adam", _torch(torch.optim.Adam)),
    "adamw": Method("AdamW", _torch(torch.optim.AdamW)),
    "path-momentum": Method("Path-SGD, momentum 0.9", _path_sgd(momentum=0.9), invariant=True),
    "path-adagrad": Method("Path-AdaGrad", _normalized(torch.optim.Adagrad), invariant=True),
    "path-adam": Method("Path-Adam", _normalized(torch.optim.Adam), invariant=True),
    "path-adamw": Method("Path-AdamW", _normalized(torch.optim.AdamW), invariant=True),
}


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise PathError(f"Unknown method: {name!r} (one of {', '.join(METHODS)})")
    return METHODS[name]
