"""The optimizers that are measured side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from pathsgd import PathAdagrad, PathAdam, PathGraph, PathMuon, PathNormalized, PathSGD
from pathsgd.console.muon import Muon, MuonAndSGD
from pathsgd.console.timing import LR, Stepper


class NaivePathSGD:
    """Algorithm 1 written by hand for linear layers with ReLU between them, without any fusing."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear)]

    @torch.no_grad()
    def step(self) -> None:
        first, last = self.layers[0].weight, self.layers[-1].weight
        gamma_in = [first.new_ones(first.shape[1])]
        for layer in self.layers[:-1]:
            gamma_in.append(layer.weight.square() @ gamma_in[-1] + layer.bias.square())
        gamma_out = [last.new_ones(last.shape[0])]
        for layer in self.layers[:0:-1]:
            gamma_out.append(gamma_out[-1] @ layer.weight.square())
        for layer, n, m in zip(self.layers, gamma_in, reversed(gamma_out), strict=True):
            assert layer.weight.grad is not None
            assert layer.bias.grad is not None
            layer.weight.sub_(LR * layer.weight.grad / torch.outer(m, n))
            layer.bias.sub_(LR * layer.bias.grad / m)


def _is_stack(model: nn.Module) -> bool:
    return all(isinstance(m, (nn.Linear, nn.ReLU)) for m in model.modules() if not list(m.children()))


def _naive(model: nn.Module, graph: PathGraph) -> Stepper | None:
    return NaivePathSGD(model) if _is_stack(model) else None


def _muon(model: nn.Module, graph: PathGraph) -> Stepper | None:
    if not _on_gpu(model):  # on a CPU its orthogonalisation takes minutes for a layer of 4000
        return None
    if not _is_stack(model):
        return Muon(model, LR, LR)
    return MuonAndSGD(model, LR) if hasattr(torch.optim, "Muon") else None


def _path_muon(model: nn.Module, graph: PathGraph) -> Stepper | None:
    return PathMuon(model, graph, LR) if _on_gpu(model) else None


def _adagrad(model: nn.Module, graph: PathGraph) -> Stepper:
    # torch's own is fused on the CPU only.
    return torch.optim.Adagrad(model.parameters(), LR, **({} if _on_gpu(model) else {"fused": True}))


def _on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


class Method(NamedTuple):
    """An optimizer, and the one of torch's that its steps are compared with."""

    beside: str
    make: Callable[[nn.Module, PathGraph], Stepper | None]
    """None where the method does not apply."""


SGD, MOMENTUM, ADAGRAD, ADAMW, MUON = (
    "SGD, fused",
    "SGD, momentum, fused",
    "Adagrad",
    "AdamW, fused",
    "Muon",
)
METHODS = {
    "SGD, foreach": Method(SGD, lambda m, g: torch.optim.SGD(m.parameters(), LR, foreach=True)),
    SGD: Method(SGD, lambda m, g: torch.optim.SGD(m.parameters(), LR, fused=True)),
    "PathSGD": Method(SGD, lambda m, g: PathSGD(m, g, lr=LR)),
    "PathSGD, reference": Method(SGD, lambda m, g: PathSGD(m, g, lr=LR, implementation="reference")),
    "Path-SGD by hand": Method(SGD, _naive),
    MOMENTUM: Method(MOMENTUM, lambda m, g: torch.optim.SGD(m.parameters(), LR, momentum=0.9, fused=True)),
    "PathSGD, momentum": Method(MOMENTUM, lambda m, g: PathSGD(m, g, lr=LR, momentum=0.9)),
    ADAGRAD: Method(ADAGRAD, _adagrad),
    "PathAdagrad": Method(ADAGRAD, lambda m, g: PathAdagrad(m, g, LR)),
    ADAMW: Method(
        ADAMW, lambda m, g: torch.optim.AdamW(m.parameters(), LR, fused=True, capturable=_on_gpu(m))
    ),
    "PathNormalized(AdamW)": Method(
        ADAMW,
        lambda m, g: PathNormalized(torch.optim.AdamW, m, g, lr=LR, fused=True, capturable=_on_gpu(m)),
    ),
    "PathAdam": Method(ADAMW, lambda m, g: PathAdam(m, g, LR, capturable=_on_gpu(m))),
    MUON: Method(MUON, _muon),
    "PathMuon": Method(MUON, _path_muon),
}
SWEPT = (SGD, "PathSGD", "Path-SGD by hand")
"""What is measured over batch size, width and depth."""
GENERAL = (
    SGD, "PathSGD", MOMENTUM, "PathSGD, momentum", ADAMW, "PathNormalized(AdamW)", "PathAdam", MUON,
    "PathMuon",
)  # fmt: skip
"""What is measured on networks that are not stacks of linear layers."""
HEAVY = (MUON, "PathMuon")
"""Timed by themselves: they heat the machine, and clocks go down for all that is timed beside them."""
