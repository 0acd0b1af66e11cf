"""Relative steps by Triton kernels against those in ordinary operations; here by Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
from pathsgd.geometry.rescale import name_factors
from pathsgd.optim.relative.spectral import KEY
from torch import nn
from torch.nn import functional as F

from pathsgd import PathAdam, PathMuon, PathNormalized, rescale, trace
from pathsgd.graph.unit_classes import unit_classes_of
from support.networks import Mlp, Recurrent, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIMIZERS = {
    "PathMuon": PathMuon,
    "PathMuon on weights": lambda model, x, **options: PathMuon(
        model, x, coordinates="weights", nesterov=False, **options
    ),
    "PathAdam": lambda model, x, **options: PathAdam(
        model, x, weight_decay=0.1, betas=(0.9, 0.95), **options
    ),
}


class Convolutions(nn.Sequential):
    """Grouped, each group reading other inputs; depthwise; transposed; after batch norm."""

    example = (2, 3, 4, 4)

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 9, 3, padding=1),
            nn.BatchNorm2d(9),
            nn.ReLU(),
            nn.Conv2d(9, 6, 3, padding=1, groups=3, bias=False),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1, groups=6),
            nn.ReLU(),
            nn.ConvTranspose2d(6, 2, 2),
        )


class OneChannel(nn.Sequential):
    """A kernel of one row; the next has one input."""

    example = (2, 3, 4, 4)

    def __init__(self):
        super().__init__(nn.Conv2d(3, 1, 3, padding=1), nn.ReLU(), nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 1))


class Wide(nn.Sequential):
    """More rows and columns than a program goes over at a time."""

    example = (2, 1500)

    def __init__(self):
        super().__init__(nn.Linear(1500, 4), nn.ReLU(), nn.Linear(4, 1030))


class Packed(nn.Module):
    """Queries, keys and values in one matrix, once as rows and once, transposed, as columns; positions."""

    example = (2, 4, 6)

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 4, 6))
        self.rows = nn.Linear(6, 18)
        self.columns = nn.Parameter(torch.randn(6, 18))
        self.shift = nn.Parameter(torch.randn(18))
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = x + self.positions
        for packed in (self.rows(x), x @ self.columns + self.shift):
            q, k, v = packed.chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v)
        return self.head(x.mean(1)) * self.scale


class Deep(nn.Sequential):
    """So many layers that norms take a part of the step."""

    example = (2, 4)

    def __init__(self):
        layers = [layer for _ in range(14) for layer in (nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU6())]
        super().__init__(*layers, nn.Linear(4, 2))


def channels_last(network):
    def make():
        model, x = build(network, torch.float32)
        return model.to(memory_format=torch.channels_last), x

    return make


CASES = {
    "Mlp": lambda: build(Mlp, torch.float32),
    "Recurrent": lambda: build(Recurrent, torch.float32),
    "Convolutions": lambda: build(Convolutions, torch.float32),
    "channels last": channels_last(Convolutions),
    "one channel": lambda: build(OneChannel, torch.float32),
    "Packed": lambda: build(Packed, torch.float32),
    "Wide": lambda: build(Wide, torch.float32),
    "Deep": lambda: build(Deep, torch.float32),
}
PAIRS = [
    *((case, "PathMuon") for case in CASES if case != "Wide"),
    *((case, "PathAdam") for case in ("channels last", "one channel", "Packed", "Wide", "Deep")),
    ("Mlp", "PathMuon on weights"),
]


def train(model, x, optimizer, steps=2):
    model.train()  # cudnn's RNN demands it
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # two images would make its gradients wild
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(1), torch.arange(len(x), device=DEVICE) % 2).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def uses_kernels(optimizer):
    return "triton" in optimizer.implementations.values()


def both_ways(model, x, make):
    """(weights by kernels, weights in ordinary operations)."""
    found = []
    for implementation in ("triton", "reference"):
        own = copy.deepcopy(model).to(DEVICE)
        optimizer = make(own, x[:1].to(DEVICE), implementation=implementation)
        found.append(train(own, x.to(DEVICE), optimizer))
        assert uses_kernels(optimizer) == (implementation == "triton")
    return found


def gap(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_kernels_take_the_same_steps(case, name):
    found, expected = both_ways(*CASES[case](), OPTIMIZERS[name])
    # On a GPU the kernels round directions to bf16 before they are normalised, the reference after.
    assert gap(found, expected) <= (0.1 if DEVICE == "cuda" and "Muon" in name else 2e-6)


@pytest.mark.parametrize("case", ["channels last", "Packed"])
def test_the_vectors_of_spectral_norms_pass_from_one_to_the_other(case):
    model, x = CASES[case]()
    model, x = model.to(DEVICE), x.to(DEVICE)
    ends, vectors = [], []
    for implementations in (("triton", "reference"), ("reference", "triton"), ("reference", "reference")):
        own, state = copy.deepcopy(model), None
        for implementation in implementations:
            optimizer = OPTIMIZERS["PathAdam"](own, x, implementation=implementation)
            if state is not None:
                optimizer.load_state_dict(state)
            weights, state = train(own, x, optimizer, 1), optimizer.state_dict()
        ends.append(weights)
        vectors.append(torch.cat([own[KEY] for own in state["state"].values() if KEY in own]))
    for k in (0, 1):
        assert gap(ends[k], ends[2]) <= 2e-6
        assert gap(vectors[k], vectors[2]) <= 1e-4


@pytest.mark.parametrize("name", ["PathMuon", "PathAdam"])
def test_groups_differ_and_some_parameters_rest(name):
    def make(model, x, **options):
        first, *rest = model.parameters()
        rest[-1].requires_grad_(False)
        groups = [{"params": [first], "lr": 0.01, "weight_decay": 0.2}, {"params": rest}]
        return OPTIMIZERS[name](groups, trace(model, x), **options)

    found, expected = both_ways(*CASES["Mlp"](), make)
    assert gap(found, expected) <= (0.1 if DEVICE == "cuda" and "Muon" in name else 2e-6)


@pytest.mark.parametrize("name", ["PathMuon", "PathAdam"])
def test_a_rescaled_copy_takes_the_same_steps_to_the_last_bit(name):
    """By powers of two; and so do two runs."""
    ends = []
    for exponent in (0.0, 0.0, 1.0):
        model, x = build(Mlp, torch.float32)
        model, x = model.to(DEVICE), x.to(DEVICE)
        graph = trace(model, x[:1])
        units = unit_classes_of(graph)
        drawn = torch.randint(-9, 10, (units.count,), generator=torch.Generator().manual_seed(0))
        rescale(model, graph, name_factors(units, torch.exp2(exponent * drawn)))
        optimizer = OPTIMIZERS[name](model, graph, implementation="triton")
        train(model, x, optimizer)
        ends.append(model(x))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_the_scale_of_gradients_does_not_matter_to_matrices():
    """Bit for bit, also where squares leave the range of fp32."""
    ends = []
    for scale in (1.0, 2.0**-90):
        model, x = build(Mlp, torch.float32)
        optimizer = PathMuon(model.to(DEVICE), x[:1].to(DEVICE), implementation="triton")
        (scale * model(x.to(DEVICE)).square().sum()).backward()
        optimizer.step()
        assert uses_kernels(optimizer)
        ends.append(torch.cat([model[k].weight.detach().flatten() for k in (0, 2)]))
    assert torch.equal(*ends)


def test_writes_are_counted():
    """By torch, so that a backward pass through weights that have moved is an error."""
    model, x = build(Mlp, torch.float32)
    model, x = model.to(DEVICE), x.to(DEVICE)
    optimizer = PathMuon(model, x[:1], implementation="triton")
    before = [p._version for p in model.parameters()]
    train(model, x, optimizer, 1)
    assert uses_kernels(optimizer)
    assert all(p._version > count for p, count in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["PathMuon", "PathAdam"])
def test_strides_along_axes_of_size_one_do_not_matter(name):
    """Those that torch.compile gives to gradients of 1x1 convolutions."""
    ends = []
    for stride in (None, 7):
        model, x = CASES["one channel"]()
        model, x = model.to(DEVICE), x.to(DEVICE)
        optimizer = OPTIMIZERS[name](model, x[:1], implementation="triton")
        model(x).square().sum().backward()
        for p in model.parameters() if stride else ():
            strides = [stride if n == 1 else own for n, own in zip(p.shape, p.grad.stride(), strict=True)]
            p.grad = p.grad.as_strided(p.shape, strides)
        optimizer.step()
        assert uses_kernels(optimizer)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_both_ways_keep_the_same_growth():
    """In a parameter of three blocks, too."""
    found = []
    for implementation in ("triton", "reference"):
        model, x = CASES["Packed"]()
        model, x = model.to(DEVICE), x.to(DEVICE)
        optimizer = PathMuon(model, x[:1], implementation=implementation)
        train(model, x, optimizer)
        states = [optimizer.state[p]["growth"] for p in (model.rows.weight, model.columns, model.head.weight)]
        found.append(torch.cat(states, 1))
    assert found[0].shape == (3, 7)
    assert (found[1][0] != 0).all()
    torch.testing.assert_close(*found, rtol=0.1 if DEVICE == "cuda" else 1e-4, atol=0)


@pytest.mark.parametrize("options", [{"maximize": True}, {"amsgrad": True}])
def test_what_the_kernels_do_not_know_they_leave(options):
    model, x = build(Mlp, torch.float32)
    model, x = model.to(DEVICE), x.to(DEVICE)
    optimizer = PathNormalized(
        torch.optim.AdamW, model, x, relative=True, lr=0.1, implementation="triton", **options
    )
    train(model, x, optimizer, 1)
    assert not uses_kernels(optimizer)
