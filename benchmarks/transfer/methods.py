"""The optimizers, each made by ``make(model, example, lr, **options)``; ``lr`` of None is the default.

A method is written ``name`` or ``name:option=value,option=value``, the values in JSON or as plain words. The
option ``set=package.module.NAME=literal``, once or several times, is not the optimizer's: it gives constants
other values while the job runs.
"""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    "balanced-muon": _relative("BalancedMuon"),
    "relative-adam": _relative("PathAdam", coordinates="weights"),
    "relative-muon": _relative("PathMuon", coordinates="weights"),
}
METHODS: dict[str, Make] = {
    **PLAIN, **RELATIVE, "path-sgd": _path_sgd, "path-adamw-plain": _path_adamw,
}  # fmt: skip
LABELS = {
    "sgd": "SGD, momentum", "adamw": "AdamW", "muon": "Muon",
    "path-adam": "PathAdam", "path-muon": "PathMuon", "balanced-muon": "BalancedMuon",
    "relative-adam": "PathAdam on weights", "relative-muon": "PathMuon on weights",
    "path-sgd": "PathSGD, momentum", "path-adamw-plain": "PathNormalized(AdamW)",
}  # fmt: skip


def parse(method: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a method; ``set`` is a dict from dotted names to values."""
    name, _, rest = method.partition(":")
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    pairs = [pair.partition("=") for pair in re.split(r",(?=\w+=)", rest)] if rest else []
    options = {key: _value(text) for key, _, text in pairs if key != "set"}
    constants = [text.partition("=") for key, _, text in pairs if key == "set"]
    if constants:
        options["set"] = {path: ast.literal_eval(text) for path, _, text in constants}
    return name, options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def make_optimizer(method: str, model: nn.Module, example: Any, lr: float | None) -> torch.optim.Optimizer:
    """The optimizer of a job."""
    name, options = parse(method)
    options.pop("set", None)
    if lr is not None:
        options["lr"] = lr
    return METHODS[name](model, example, **options)


@contextmanager
def constants_set(method: str) -> Iterator[bool]:
    """Gives the constants that a method names their values, and puts the old ones back.

    A module of pathsgd that has imported a constant by its name has it set, too.

    Yields:
        Whether there are any.

    Raises:
        AttributeError: there is no such constant.
    """
    constants = parse(method)[1].get("set", {})
    before: list[tuple[Any, str, Any]] = []
    try:
        for path, value in constants.items():
            place, _, name = path.rpartition(".")
            home = pkgutil.resolve_name(place)
            old = getattr(home, name)
            others = [module for key, module in sys.modules.items() if key.partition(".")[0] == "pathsgd"]
            for holder in [home, *(m for m in others if m is not home and vars(m).get(name) is old)]:
                before.append((holder, name, old))
                setattr(holder, name, value)
        yield bool(constants)
    finally:
        for holder, name, old in reversed(before):
            setattr(holder, name, old)


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
    for path, value in options.pop("set", {}).items():
        options[path.rpartition(".")[2]] = value
    extra = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{LABELS[name]} ({extra})" if extra else LABELS[name]
