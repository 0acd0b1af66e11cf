"""An optimizer that is freed while something is captured: ``pytest -m gpu``."""

from __future__ import annotations

import gc

import pytest
import torch

from pathsgd import BalancedMuon, PathSGD
from support.networks import Mlp, build

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", [BalancedMuon, lambda model, x: PathSGD(model, x, lr=1e-3)])
def test_freed_during_a_capture(kind):
    model, x = build(Mlp, torch.float32)
    model, x = model.cuda(), x.cuda()
    optimizer = kind(model, x)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # makes it refer to itself
    for _ in range(8):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    gc.collect()
    gc.disable()
    try:
        del optimizer
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            gc.collect()
            found = x + 1
    finally:
        gc.enable()
    graph.replay()
    assert torch.equal(found, x + 1)
