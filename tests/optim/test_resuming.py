"""A resumed training is the uninterrupted one to the last bit, whatever moves the parameters."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from pathsgd import PathMuon, PathNormalized, PathSGD
from pathsgd.graph.export import tensors_in
from support.cases import CASES, traced
from support.cases import build as build_case
from support.stacks import is_fused, stack

OPTIMIZERS = {
    "PathSGD": lambda m, g, **kw: PathSGD(m, g, lr=1e-4, **kw),
    "momentum": lambda m, g, **kw: PathSGD(m, g, lr=1e-4, momentum=0.9, weight_decay=0.1, **kw),
    "Adagrad": lambda m, g, **kw: PathNormalized(torch.optim.Adagrad, m, g, lr=1e-3, **kw),
    "AdamW": lambda m, g, **kw: PathNormalized(torch.optim.AdamW, m, g, lr=1e-3, **kw),
    "PathMuon": lambda m, g, **kw: PathMuon(m, g, **kw),
}
FUSED = [name for name in OPTIMIZERS if name != "PathMuon"]


def run(model, optimizer, x, steps):
    torch.manual_seed(1)  # of dropout
    for step in range(steps):
        optimizer.zero_grad()
        sum(y.square().mean() for y in tensors_in(model(x * (1 + step)))).backward()
        optimizer.step()


def check_resumed(model, make, x, steps=2):
    """Copies, pickles and loads the optimizer in mid-training; all go on as it does itself."""
    fresh = copy.deepcopy(model)
    optimizer = make(model)
    run(model, optimizer, x, steps)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file)
    fresh.load_state_dict(weights)
    loaded = make(fresh)
    loaded.load_state_dict(state)
    copied, pickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    run(model, optimizer, x, steps)
    for how, other in {"loaded": loaded, "copied": copied, "pickled": pickled}.items():
        run(other.gamma_cache.model, other, x, steps)
        for (name, found), expected in zip(
            other.gamma_cache.model.named_parameters(), model.parameters(), strict=True
        ):
            assert torch.equal(found, expected), (how, name)
    return optimizer


@pytest.mark.parametrize("name", ["momentum", "AdamW", "PathMuon"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_case(case, name):
    model = build_case(case)
    check_resumed(model, lambda m: OPTIMIZERS[name](m, traced(case)), model.example())


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("widths", [(20, 70, 33, 5), (20, 70, 60, 50, 5)], ids=str)
def test_blocks_of_linear_layers(widths, name, monkeypatch):
    monkeypatch.setattr("pathsgd.optim.fused.blocked.BLOCK", 500)  # so that a layer has several
    check_stack(widths, OPTIMIZERS[name], "blocked")


@pytest.mark.parametrize(
    ("name", "widths"), [("PathSGD", (9, 20, 17, 13, 4)), ("AdamW", (9, 20, 13, 4))], ids=str
)
def test_linear_layers_in_triton(name, widths):
    check_stack(widths, OPTIMIZERS[name], "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("widths", [(784, 4000, 4000, 10), (300, 700, 600, 500, 400, 10)], ids=str)
def test_linear_layers_on_a_gpu(widths, name):
    """Five steps and more: the last ones are replayed from CUDA graphs."""
    check_stack(widths, OPTIMIZERS[name], "triton", steps=5, device="cuda")


def check_stack(widths, make, kind, steps=2, device="cpu"):
    x, model = torch.randn(16, widths[0], device=device), stack(*widths).to(device)
    optimizer = check_resumed(model, lambda m: make(m, None, implementation=kind), x, steps)
    assert is_fused(optimizer)
