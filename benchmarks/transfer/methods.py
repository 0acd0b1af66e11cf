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
from pathsgd.console.muon import Muon

Make = Callable[..., torch.optim.Optimizer]


def _sgd(model: nn.Module, example: Any, lr: float = 0.01, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, fused=True, **options)


def _adamw(model: nn.Module, example: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr, fused=True, capturable=_on_gpu(model), **options)


def _muon(
    model: nn.Module, example: Any, lr: float = 0.02, adamw_lr: float = 3e-3, **options: Any
) -> torch.optim.Optimizer:
    return Muon(model, lr, adamw_lr, **options)


def _path_sgd(model: nn.Module, example: Any, lr: float = 0.01, **options: Any) -> torch.optim.Optimizer:
    return pathsgd.PathSGD(model, example, lr=lr, momentum=0.9, **options)


def _path_adamw(model: nn.Module, example: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:
    return pathsgd.PathNormalized(
        torch.optim.AdamW, model, example, lr=lr, capturable=_on_gpu(model), **options
    )


def _on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


def _relative(name: str, **fixed: Any) -> Make:
    """A class of pathsgd with its own default rate. Looked up late: without it only its own jobs fail."""

    def make(model: nn.Module, example: Any, **options: Any) -> torch.optim.Optimizer:
        if name == "PathAdam":
            options["capturable"] = _on_gpu(model)
        return getattr(pathsgd, name)(model, example, **{**fixed, **options})

    make.name = name  # type: ignore[attr-defined]
    return make


PLAIN: dict[str, Make] = {"sgd": _sgd, "adamw": _adamw, "muon": _muon}
RELATIVE: dict[str, Make] = {
    "path-adam": _relative("PathAdam"),
    "path-muon": _relative("PathMuon"),
    "relative-adam": _relative("PathAdam", coordinates="weights"),
    "relative-muon": _relative("PathMuon", coordinates="weights"),
}
METHODS: dict[str, Make] = {
    **PLAIN, **RELATIVE, "path-sgd": _path_sgd, "path-adamw-plain": _path_adamw,
}  # fmt: skip
LABELS = {
    "sgd": "SGD, momentum", "adamw": "AdamW", "muon": "Muon",
    "path-adam": "PathAdam", "path-muon": "PathMuon",
    "relative-adam": "PathAdam on weights", "relative-muon": "PathMuon on weights",
    "path-sgd": "PathSGD, momentum", "path-adamw-plain": "PathNormalized(AdamW)",
}  # fmt: skip


def parse(method: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a method."""
    name, _, rest = method.partition(":")
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    pairs = [pair.partition("=") for pair in re.split(r",(?=\w+=)", rest)] if rest else []
    return name, {key: _value(text) for key, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def make_optimizer(method: str, model: nn.Module, example: Any, lr: float | None) -> torch.optim.Optimizer:
    """The optimizer of a job."""
    name, options = parse(method)
    if lr is not None:
        options["lr"] = lr
    return METHODS[name](model, example, **options)


def needs_paths(method: str) -> bool:
    """Whether the method takes a traced model."""
    return parse(method)[0] not in PLAIN


def default_rate(method: str) -> float:
    """The rate that a job without one gets.

    Raises:
        AttributeError: this pathsgd does not have the method.
    """
    name, options = parse(method)
    if "lr" in options:
        return float(options["lr"])
    maker: Any = METHODS[name]
    if name in RELATIVE:
        return float(getattr(pathsgd, maker.name).default_lr)
    return float(inspect.signature(maker).parameters["lr"].default)


def label(method: str) -> str:
    """How tables call it. Muon's second rate is chosen for it, so it does not tell methods apart."""
    name, options = parse(method)
    options.pop("adamw_lr", None)
    extra = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{LABELS[name]} ({extra})" if extra else LABELS[name]
