"""The garbage collector frees an optimizer while the user captures a CUDA graph: ``pytest -m gpu``."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import gc, sys, torch, pathsgd
from support.networks import Mlp, SmallResNet, build

gc.disable()
# torch gives out its 32 streams again and again: here, one.
shared, new = torch.cuda.Stream(), torch.cuda.Stream.__new__
same = {name: getattr(shared, name) for name in ("stream_id", "device_index", "device_type")}
torch.cuda.Stream.__new__ = lambda cls, *args, **options: new(cls, **({**same, **options}))

def train(net, make):
    model, x = build(net, torch.float32)
    model, x = model.cuda(), x.cuda()
    model.optimizer = make(model, x)
    model.optimizer.model = model
    for _ in range(6):
        model.optimizer.zero_grad()
        model(x).square().mean().backward()
        model.optimizer.step()
        pathsgd.path_norm(model, x)

make = {
    "PathSGD": lambda model, x: pathsgd.PathSGD(model, x, lr=1e-3),
    "PathAdam": pathsgd.PathAdam,
    "PathMuon": pathsgd.PathMuon,
}[sys.argv[1]]
for net in (Mlp, SmallResNet):
    train(net, make)
    a = torch.zeros(8, device="cuda")
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    for graph in graphs:
        with torch.cuda.graph(graph, stream=shared):
            a += 1
            assert gc.collect() or graph is not graphs[0]
        graph.replay()
    assert a.tolist() == [3] * 8
"""


@pytest.mark.parametrize("optimizer", ["PathSGD", "PathAdam", "PathMuon"])
def test_captures_go_on(optimizer):
    done = subprocess.run([sys.executable, "-c", PROGRAM, optimizer], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
