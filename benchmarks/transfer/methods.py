"""The optimizers, each made by ``make(model, example, lr, **options)``; ``lr`` of None is the default.

A method is written ``name`` or ``name:option=value,option=value``, the values in JSON or as plain words.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pathsgd

from ..muon import Muon

Make = Callable[..., torch.optim.Optimizer]


def _sgd(model: nn.Module, example: Any, lr: float = 0.01, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, fused=True, **options)


def _adamw(model: nn.Module, example: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr, fused=True, capturable=_on_gpu(model), **options)


def _muon(
    model: nn.Module, example: Any, lr: float = 0.02, adamw_lr: float = 3e-3, **options: Any
) -> torch.optim.Optimizer:
    return Muon(model, lr, adamw_lr, **options)


def _balanced_muon(
    model: nn.Module, example: Any, lr: float | None = None, **options: Any
) -> torch.optim.Optimizer:
    return pathsgd.BalancedMuon(model, example, lr, **options)


def _path_sgd(model: nn.Module, example: Any, lr: float = 0.01, **options: Any) -> torch.optim.Optimizer:
    return pathsgd.PathSGD(model, example, lr=lr, momentum=0.9, **options)


def _path_adamw(model: nn.Module, example: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:
    return pathsgd.PathNormalized(
        torch.optim.AdamW, model, example, lr=lr, capturable=_on_gpu(model), **options
    )


def _on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


PLAIN: dict[str, Make] = {"sgd": _sgd, "adamw": _adamw, "muon": _muon}
METHODS: dict[str, Make] = {
    **PLAIN, "balanced-muon": _balanced_muon, "path-sgd": _path_sgd, "path-adamw-plain": _path_adamw,
}  # fmt: skip
AT_DEFAULT = ("balanced-muon",)
"""Methods that are run at their one default rate."""
LABELS = {
    "sgd": "SGD, momentum", "adamw": "AdamW", "muon": "Muon",
    "path-adam": "PathAdam", "path-muon": "PathMuon", "balanced-muon": "BalancedMuon",
    "relative-adam": "PathAdam on weights", "relative-muon": "PathMuon on weights",
    "path-sgd": "PathSGD, momentum", "path-adamw-plain": "PathNormalized(AdamW)",
}  # fmt: skip
"""Names in tables; those that are not in METHODS are of recorded runs."""


def parse(method: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a method.

    The option ``set=package.module.NAME=value`` of recorded runs stands under ``NAME``.
    """
    name, _, rest = method.partition(":")
    if name not in LABELS:
        raise ValueError(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    pairs = [pair.removeprefix("set=").rpartition("=") for pair in re.split(r",(?=\w+=)", rest) if pair]
    return name, {key.rpartition(".")[2]: _value(text) for key, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def make_optimizer(method: str, model: nn.Module, example: Any, lr: float | None) -> torch.optim.Optimizer:
    """The optimizer of a job."""
    name, options = parse(method)
    if name not in METHODS:
        raise ValueError(f"{LABELS[name]} was removed; there are {', '.join(METHODS)}")
    if lr is not None:
        options["lr"] = lr
    return METHODS[name](model, example, **options)


def needs_paths(method: str) -> bool:
    """Whether the method takes a traced model."""
    return parse(method)[0] not in PLAIN


def default_rate(method: str) -> float:
    """The rate that a job without one gets."""
    name, options = parse(method)
    if name in AT_DEFAULT:
        return float(options.get("lr", pathsgd.BalancedMuon.default_lr))
    return float(options.get("lr", inspect.signature(METHODS[name]).parameters["lr"].default))


def label(method: str) -> str:
    """The name in tables. Muon's second rate is chosen for it, so it does not tell methods apart."""
    name, options = parse(method)
    options.pop("adamw_lr", None)
    extra = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{LABELS[name]} ({extra})" if extra else LABELS[name]
