"""The optimizers, and what a search varies of each.

A method is written ``name`` or ``name:option=value,option=value``, the values in JSON or as plain words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import pathsgd

from .baselines import SOAP, Muon, MuonH, NorMuon, ScheduleFreeAdamW, adamw
from .search import Coordinate


@dataclass(frozen=True)
class Method:
    """An optimizer of the league.

    Attributes:
        label: its name in tables.
        make: makes it, by ``make(model, example, **options)``.
        coordinates: what is searched, the most important first; nothing if it runs at its defaults only.
        schedule: the one that belongs to it; by default that of the network.
    """

    label: str
    make: Callable[..., torch.optim.Optimizer]
    coordinates: tuple[Coordinate, ...] = ()
    schedule: str | None = None


def _without_example(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    return lambda model, example, **options: make(model, **options)


def _balanced_muon(model: nn.Module, example: Any, **options: Any) -> torch.optim.Optimizer:
    return pathsgd.BalancedMuon(model, example, **options)


METHODS = {
    "adamw": Method(
        "AdamW", _without_example(adamw), (Coordinate("lr", 1e-3, 2), Coordinate("weight_decay", 1e-2, 10)),
    ),
    "muon": Method(
        "Muon", _without_example(Muon),
        (Coordinate("lr", 1e-3, 2), Coordinate("rest_lr", 1e-3, 3), Coordinate("weight_decay", 0.1, 5)),
    ),
    "muonh": Method(
        "MuonH", _without_example(MuonH), (Coordinate("lr", 5e-3, 2), Coordinate("rest_lr", 6e-4, 3))
    ),
    "normuon": Method(
        "NorMuon", _without_example(NorMuon),
        (Coordinate("lr", 1e-3, 2), Coordinate("rest_lr", 1e-3, 3), Coordinate("weight_decay", 0.1, 5)),
    ),
    "soap": Method(
        "SOAP", _without_example(SOAP), (Coordinate("lr", 3e-3, 2), Coordinate("weight_decay", 1e-2, 10))
    ),
    "schedule-free": Method(
        "Schedule-Free AdamW", _without_example(ScheduleFreeAdamW), (Coordinate("lr", 2.5e-3, 2),),
        schedule="warm-up",
    ),
    "balanced-muon": Method("BalancedMuon", _balanced_muon),
}  # fmt: skip


def parse(method: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a method."""
    name, _, rest = method.partition(":")
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    pairs = [pair.partition("=") for pair in re.split(r",(?=\w+=)", rest) if pair]
    return name, {key: _value(text) for key, _, text in pairs}


def write(name: str, options: dict[str, Any]) -> str:
    """A method of a name and options, as ``parse`` reads it."""
    pairs = ",".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={json.dumps(value)}"
        for key, value in options.items()
    )
    return f"{name}:{pairs}" if pairs else name


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def make_optimizer(method: str, model: nn.Module, example: Any) -> torch.optim.Optimizer:
    """The optimizer of a job."""
    name, options = parse(method)
    return METHODS[name].make(model, example, **options)


def label(method: str) -> str:
    """The name in tables."""
    name, options = parse(method)
    extra = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{METHODS[name].label} ({extra})" if extra else METHODS[name].label
