"""torch's Muon for whole models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from pathsgd.errors import PathError


class MuonAndSGD:
    """Muon for the matrices of a model, which is all it takes, and SGD for the other parameters."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise PathError(f"muon needs a torch that has it; this is {torch.__version__}")
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        self.parts: list[Optimizer] = [torch.optim.Muon(matrices, lr)]
        if rest:
            self.parts.append(torch.optim.SGD(rest, lr, fused=True))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {p: state for part in self.parts for p, state in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(k): part.state_dict() for k, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for k, part in enumerate(self.parts):
            part.load_state_dict(state[str(k)])
