"""The optimizers that are measured side by side."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pathsgd import PathAdagrad, PathNormalized, PathSGD
from pathsgd.console.muon import MuonAndSGD
from pathsgd.console.timing import LR, MakeOptimizer, Stepper

BASELINE = "SGD, fused"


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


def _only_linear(model: nn.Module) -> bool:
    return all(isinstance(m, (nn.Linear, nn.ReLU)) for m in model.modules() if not list(m.children()))


def _naive(model: nn.Module, x: Tensor) -> Stepper | None:
    return NaivePathSGD(model) if _only_linear(model) else None


def _muon(model: nn.Module, x: Tensor) -> Stepper | None:
    # On a CPU its orthogonalisation takes minutes for a layer of 4000.
    applies = hasattr(torch.optim, "Muon") and x.is_cuda and _only_linear(model)
    return MuonAndSGD(model, LR) if applies else None


def _adagrad(model: nn.Module, x: Tensor) -> Stepper:
    # torch's own is fused on the CPU only.
    return torch.optim.Adagrad(model.parameters(), LR, **({} if x.is_cuda else {"fused": True}))


METHODS: dict[str, MakeOptimizer] = {
    "SGD, foreach": lambda m, x: torch.optim.SGD(m.parameters(), LR, foreach=True),
    BASELINE: lambda m, x: torch.optim.SGD(m.parameters(), LR, fused=True),
    "PathSGD": lambda m, x: PathSGD(m, x, lr=LR),
    "PathSGD, reference": lambda m, x: PathSGD(m, x, lr=LR, implementation="reference"),
    "Path-SGD by hand": _naive,
    "SGD, momentum, fused": lambda m, x: torch.optim.SGD(m.parameters(), LR, momentum=0.9, fused=True),
    "PathSGD, momentum": lambda m, x: PathSGD(m, x, lr=LR, momentum=0.9),
    "Adagrad": _adagrad,
    "PathAdagrad": lambda m, x: PathAdagrad(m, x, LR),
    "AdamW, fused": lambda m, x: torch.optim.AdamW(m.parameters(), LR, fused=True, capturable=x.is_cuda),
    "PathNormalized(AdamW)": lambda m, x: PathNormalized(
        torch.optim.AdamW, m, x, lr=LR, fused=True, capturable=x.is_cuda
    ),
    "Muon": _muon,
}
SWEPT = (BASELINE, "PathSGD", "Path-SGD by hand")
"""What is measured over batch size, width and depth."""
HEAVY = ("Muon",)
"""Timed by themselves: they heat the machine, and clocks go down for all that is timed beside them."""
