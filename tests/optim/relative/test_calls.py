"""How much a relative step does: on a CPU a call of torch costs as much as thousands of numbers."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pathsgd
from pathsgd import PathAdam


class Calls(TorchDispatchMode):
    """Counts the calls of torch, and those that make a tensor as large as ``numel``."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count, self.made = numel, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.count += 1
        made = found if isinstance(found, (list, tuple)) else [found]
        fresh = not any(own.alias_info is not None for own in function._schema.returns)
        self.made += fresh and any(isinstance(t, torch.Tensor) and t.numel() == self.numel for t in made)
        return found


def test_a_relative_step_of_a_small_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(31, 23), nn.ReLU(), nn.Linear(23, 11), nn.ReLU(), nn.Linear(11, 3))
    optimizer = PathAdam(model, pathsgd.trace(model), 1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 31)).square().sum().backward()
        optimizer.step()
    with Calls(numel=31 * 23) as calls:
        optimizer.step()
    assert 0 < calls.count <= 480
    assert 0 < calls.made <= 9
