"""A measurement for the next step that is under way when the model is deleted: ``pytest -m gpu``."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import gc, torch
from pathsgd import PathMuon
from pathsgd.optim.captured_measurement import CapturedMeasurement
from support.networks import Transformer, build

replay = CapturedMeasurement.replay

def replay_late(self, check):
    torch.cuda._sleep(2_000_000_000)
    return replay(self, check)

def train():
    model, x = build(Transformer, torch.float32)
    model, x = model.cuda(), x.cuda()
    optimizer = PathMuon(model, x)
    for k in range(8):
        if k == 7:
            torch.cuda.synchronize()
            CapturedMeasurement.replay = replay_late
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert optimizer.gamma_cache._ahead

train()
gc.collect()
outside = [torch.full((n,), 1 << 40, device="cuda") for n in (1, 4, 16, 64, 256, 1024) for _ in range(2000)]
torch.cuda.synchronize()
"""


def test_deleted_under_way():
    """Indices that it reads are not written over: one out of bounds would end the process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
