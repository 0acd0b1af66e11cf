"""The methods that can be compared, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from pathsgd import PathError, PathGraph, PathNormalized, PathSGD
from pathsgd.console.muon import MuonAndSGD
from pathsgd.paper.training.fused_adagrad import FusedAdagrad

Make = Callable[[nn.Module, PathGraph, float, float], Any]
"""(model, its graph, lr, p) -> an optimizer."""


@dataclass(frozen=True)
class Method:
    label: str
    make: Make
    invariant: bool = False
    """Whether a rescaling of the network changes nothing."""


def _torch(kind: type[Optimizer], **options: Any) -> Make:
    def make(model: nn.Module, graph: PathGraph, lr: float, p: float) -> Optimizer:
        return kind(model.parameters(), lr=lr, **_for_device(kind, model, options))  # type: ignore[call-arg]

    return make


def _for_device(kind: type[Optimizer], model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Fused where torch has it, with steps counted on the device: they are captured in CUDA graphs.

    Adagrad counts its steps on the host, which a replay leaves as they are: only a decay of lr looks there.
    """
    on_gpu = next(model.parameters()).is_cuda
    if kind is torch.optim.Adagrad:
        return {**options, "fused": None if on_gpu else True}
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return {**options, "fused": True, "capturable": on_gpu}
    return {**options, "fused": True}


def _adagrad(model: nn.Module, graph: PathGraph, lr: float, p: float) -> Optimizer:
    parameters = list(model.parameters())
    # One pass over the memory instead of five, where Triton is there to make it.
    if parameters[0].is_cuda and find_spec("triton") is not None:
        return FusedAdagrad(parameters, lr=lr)
    return _torch(torch.optim.Adagrad)(model, graph, lr, p)


def _normalized(kind: type[Optimizer]) -> Make:
    return lambda m, g, lr, p: PathNormalized(kind, m, g, p=p, lr=lr, **_for_device(kind, m, {}))


def _path_sgd(**options: Any) -> Make:
    return lambda m, g, lr, p: PathSGD(m, g, lr=lr, p=p, **options)


METHODS: dict[str, Method] = {
    "sgd": Method("SGD", _torch(torch.optim.SGD)),
    "adagrad": Method("AdaGrad", _adagrad),
    "path-sgd": Method("Path-SGD", _path_sgd(), invariant=True),
    "momentum": Method("SGD, momentum 0.9", _torch(torch.optim.SGD, momentum=0.9)),
    "adam": Method("Adam", _torch(torch.optim.Adam)),
    "adamw": Method("AdamW", _torch(torch.optim.AdamW)),
    "muon": Method("Muon", lambda m, g, lr, p: MuonAndSGD(m, lr)),
    "path-momentum": Method("Path-SGD, momentum 0.9", _path_sgd(momentum=0.9), invariant=True),
    "path-adagrad": Method("Path-AdaGrad", _normalized(torch.optim.Adagrad), invariant=True),
    "path-adam": Method("Path-Adam", _normalized(torch.optim.Adam), invariant=True),
    "path-adamw": Method("Path-AdamW", _normalized(torch.optim.AdamW), invariant=True),
}


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise PathError(f"Unknown method: {name!r} (one of {', '.join(METHODS)})")
    return METHODS[name]
