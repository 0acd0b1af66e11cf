"""How much a relative step does: on a CPU a call of torch costs as much as thousands of numbers."""

from __future__ import annotations

import torch
from torch import nn

import pathsgd
from pathsgd import PathAdam
from support.calls import Calls


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
