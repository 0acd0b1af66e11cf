"""A user's CUDA graph of whole training steps, in which the passes over the weights wait for nothing."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pathsgd import PathAdam, PathMuon, PathNormalized, PathSGD, clip_path_grad_norm_
from pathsgd.optim import gamma_cache
from pathsgd.optim.capture_from_start import capture_after, capture_from_start
from support.networks import Mlp, SmallResNet, Transformer, Vgg, build

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "PathMuon": PathMuon,
    "PathAdam": lambda model, x: PathAdam(model, x, capturable=True),
    "PathSGD": lambda model, x: PathSGD(model, x, lr=1e-4, implementation="reference"),
    "momentum": lambda model, x: PathSGD(model, x, lr=1e-4, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda model, x: PathNormalized(torch.optim.AdamW, model, x, lr=1e-4, capturable=True),
}
READ_STATISTICS = ("PathSGD", "momentum", "AdamW")


class Unbalanced(Mlp):
    """Its gammas and the factors of its units leave the range of floats."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            for tensor, factor in ((self[0].weight, 70), (self[0].bias, 70), (self[2].weight, -70)):
                tensor.mul_(2.0**factor)


def once(model, x, optimizer, clip=False):
    optimizer.zero_grad()
    outputs = model(x)
    F.cross_entropy(outputs.flatten(1), torch.arange(len(outputs), device="cuda")).backward()
    if clip:
        clip_path_grad_norm_(optimizer, 1e-3)
    optimizer.step()


def clipped(model, x, optimizer):
    once(model, x, optimizer, clip=True)


def twice(model, x, optimizer):
    once(model, x, optimizer)
    once(model, x, optimizer)


def after_a_write(model, x, optimizer):
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    once(model, x, optimizer)


def make(kind, name, seed=0):
    torch.manual_seed(seed)
    model, x = build(kind, torch.float32)
    model, x = model.cuda().train(), x.cuda()
    optimizer = OPTIMIZERS[name](model, x)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device="cuda")
    return model, x, optimizer


def train(kind, name, run, from_start, monkeypatch, others=()):
    """Captures the run of one model, and then a step of each of the others, in one graph."""
    # Else cudnn chooses by time, and not the same twice: Newton-Schulz in bf16 magnifies rounding.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    trained = [make(kind, name), *(make(other, name, seed) for seed, other in enumerate(others, 1))]
    used = []

    def count(original):
        def capture(*arguments):
            used.append(original)
            return original(*arguments)

        monkeypatch.setattr(gamma_cache, original.__name__, capture)

    count(capture_from_start)
    count(capture_after)
    if not from_start:
        monkeypatch.setattr(gamma_cache.GammaCache, "_capturing", lambda *_: gamma_cache.nullcontext())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(6):
            for own in trained:
                once(*own)
    torch.cuda.current_stream().wait_stream(stream)
    for *_, optimizer in trained:
        optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run(*trained[0])
        for own in trained[1:]:
            once(*own)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    monkeypatch.undo()
    return torch.cat([p.detach().flatten() for model, *_ in trained for p in model.parameters()]), used


@pytest.mark.parametrize("run", [once, twice, after_a_write])
@pytest.mark.parametrize("kind", [Mlp, Vgg, SmallResNet, Transformer])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_weights(name, kind, run, monkeypatch):
    """A second step, and one after a captured write, wait for it; so do those that read running statistics
    for the forward pass."""
    found, used = train(kind, name, run, True, monkeypatch)
    if name not in READ_STATISTICS or kind not in (SmallResNet, Vgg):
        assert used == ([] if run is after_a_write else [capture_from_start]) or kind is Mlp
    else:  # from the end of each forward pass
        assert used == [capture_after] * (2 if run is twice else 1)
    expected, _ = train(kind, name, run, False, monkeypatch)
    assert torch.isfinite(found).all()
    assert ((found - expected).abs().max() / expected.abs().max()).item() <= 1e-5


@pytest.mark.parametrize("name", ["PathMuon", "PathSGD", "momentum"])
def test_several_models_in_one_graph(name, monkeypatch):
    """The passes over the weights of one do not lie in memory that those of another are still using."""
    others = [Transformer, Transformer]
    found, used = train(Transformer, name, once, True, monkeypatch, others)
    assert used == [capture_from_start] * 3
    expected, _ = train(Transformer, name, once, False, monkeypatch, others)
    assert torch.isfinite(found).all()
    assert ((found - expected).abs().max() / expected.abs().max()).item() <= 1e-5


@pytest.mark.parametrize("kind", [SmallResNet, Transformer])
@pytest.mark.parametrize("name", READ_STATISTICS)
def test_a_clipped_step(name, kind, monkeypatch):
    """The norm is read before the passes of the step are written over it."""
    found, used = train(kind, name, clipped, True, monkeypatch)
    assert used
    expected, _ = train(kind, name, clipped, False, monkeypatch)
    assert torch.isfinite(found).all()
    assert ((found - expected).abs().max() / expected.abs().max()).item() <= 1e-5


@pytest.mark.parametrize("name", ["PathMuon", "PathAdam", "PathSGD"])
def test_out_of_the_range_of_floats(name, monkeypatch):
    """Exponents are looked up on the device: a transfer from the host cannot be captured."""
    found, expected = (train(Unbalanced, name, once, start, monkeypatch)[0] for start in (True, False))
    sizes = [p.numel() for p in Unbalanced().parameters()]
    for ours, theirs in zip(found.split(sizes), expected.split(sizes), strict=True):
        assert torch.isfinite(ours).all()
        assert ((ours - theirs).abs().max() / theirs.abs().max()).item() <= 1e-5
