"""Equal places computed once, against every place computed by itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pathsgd
from pathsgd.geometry.gamma import measure, measure_gammas
from pathsgd.geometry.passes import PoweredNetwork
from pathsgd.geometry.scaled import Arithmetic
from pathsgd.graph.folding import fold
from pathsgd.graph.nodes import Reduce
from pathsgd.graph.unit_classes import FIXED, unit_classes_of
from support.cases import CASES, build, traced
from support.networks import NETWORKS
from support.networks import build as build_network


class Attention(nn.Module):
    """A block of a GPT: causal attention and a ReLU MLP on a residual stream, with a norm before each."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        split = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*split.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(self.up(self.norm2(x)).relu())


class Gpt(nn.Module):
    """Tied tables of tokens, learned positions, two blocks."""

    def __init__(self, places="embedded"):
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.places = nn.Parameter(torch.randn(7, 6))
        self.added = places == "added"
        self.blocks = nn.Sequential(Attention(6, 2), Attention(6, 2))
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens):
        index = torch.arange(tokens.shape[1])
        places = self.places[: tokens.shape[1]] if self.added else F.embedding(index, self.places)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + places)))


class Vit(nn.Module):
    """Patches by a strided convolution behind a learned first token; pooled by the mean."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, 4)
        self.first, self.places = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(1, 13, 6))
        self.block, self.head = Attention(6, 2), nn.Linear(6, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.block(x).mean(1).relu())


class Places(nn.Module):
    """Linear layers at equal places that are then told apart: dropped, flipped, convolved, merged."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm, self.head, self.d = nn.LayerNorm(4), nn.Linear(6 * 4, 2), nn.Linear(4, 3)

    def forward(self, x):
        h = self.a(x).relu()
        early, late = self.b(h[:, :4]).relu(), self.c(h[:, 1::2]).relu()
        h = torch.cat([early, late[:, :2]], 1).square()
        merged = self.head(self.norm(self.conv(h.transpose(1, 2)).transpose(1, 2)).flatten(1))
        return merged, self.d(h.flip(1))


class Stages(nn.Module):
    """Convolutions of every kind on a large image, in stages: residuals, a dilation, groups, poolings that
    leave out rows or see beyond the border, layers of channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 7, 2, 3), nn.BatchNorm2d(4).eval()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, (1, 5), padding=(0, 2))
        self.c, self.shortcut = nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(4, 6, 1, 2)
        self.d = nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=3)
        self.mlp, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = F.max_pool2d(self.norm(self.stem(x)).relu(), 3, 2, 1, ceil_mode=True)
        x = (x + self.b(self.a(x).relu())).relu()
        x = (self.c(x) + self.shortcut(x)).relu()
        x = torch.cat([self.d(x), F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)], 1)[:, 3:9].relu()
        x = self.mlp(x.permute(0, 2, 3, 1)).relu()
        return self.head(x.mean((1, 2)))


class Unet(nn.Module):
    """Up again: a transposed convolution and an interpolation, beside what came down; an output of all
    places."""

    def __init__(self):
        super().__init__()
        self.down, self.inner = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(4, 3, 2, 2), nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x):
        x = self.down(x).relu()
        inner = self.inner(F.avg_pool2d(x, 2)).relu()
        up = self.up(inner) + F.interpolate(inner, scale_factor=2.0)[:, :3]
        return self.out(torch.cat([x, up], 1).relu())


class Signal(nn.Module):
    """One axis, without padding; places that have weights of their own end what is equal."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 3, 5, 3), nn.Conv1d(3, 3, 3, padding=1)
        self.c, self.window = nn.Conv1d(3, 2, 3, padding=1), nn.Parameter(torch.randn(30))
        self.head = nn.Linear(60, 2)

    def forward(self, x):
        x = self.b(self.b(self.a(x).relu()).relu()).relu()
        return self.head((self.c(x).relu() * self.window).flatten(1))


IMAGES = {
    "stages": (Stages, lambda: torch.randn(2, 2, 121, 150)),
    "unet": (Unet, lambda: torch.randn(1, 2, 30, 24)),
    "signal": (Signal, lambda: torch.randn(2, 1, 93)),
}
SEQUENCES = {
    "gpt": (Gpt, lambda: torch.zeros(2, 7, dtype=torch.int64)),
    "gpt, added places": (lambda: Gpt("added"), lambda: torch.zeros(2, 7, dtype=torch.int64)),
    "vit": (Vit, lambda: torch.randn(2, 3, 12, 16)),
    "places": (Places, lambda: torch.randn(2, 6, 3)),
}


def networks():
    for case in CASES:
        yield case.__name__, lambda case=case: (build(case), traced(case))
    for network in NETWORKS:
        yield network.__name__, lambda network=network: trace(*build_network(network))
    for name, (make, example) in {**SEQUENCES, **IMAGES}.items():
        yield name, lambda make=make, example=example: trace(randomise(make()), example())


def trace(model, example):
    return model, pathsgd.trace(model, example.double() if example.is_floating_point() else example)


def randomise(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double()


BUILD = dict(networks())


@torch.no_grad()
@pytest.mark.parametrize("name", BUILD)
def test_equal_places_once_or_each_by_itself(name):
    model, graph = BUILD[name]()
    tensors = graph.tensors(model)
    for p in (2, math.inf):
        folded, whole = (
            measure(PoweredNetwork(each, tensors, Arithmetic(p))) for each in (graph.folded.graph, graph)
        )
        for parameter in graph.parameters:
            torch.testing.assert_close(
                folded[parameter].dense(), whole[parameter].dense(), rtol=1e-12, atol=0
            )


@torch.no_grad()
@pytest.mark.parametrize("name", [*SEQUENCES, "stages"])
def test_powers_of_two_change_no_bit(name):
    model, graph = BUILD[name]()
    model = model.float()
    before = measure_gammas(graph, graph.tensors(model))
    z = {n: before[n].weight_to_z(p) for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    factors = {
        owner: torch.exp2(torch.randint(-3, 4, classes.shape, generator=generator).float())
        for owner, classes in unit_classes_of(graph).owners.items()
        if bool((classes != FIXED).all())
        and owner in ("a", "b", "c", "mlp", "block.up", "blocks.0.up", "blocks.1.up")
    }
    assert factors
    pathsgd.rescale(model, graph, factors)
    after = measure_gammas(graph, graph.tensors(model))
    for n, p in model.named_parameters():
        assert torch.equal(after[n].weight_to_z(p), z[n]), n


def test_a_sequence_is_as_small_as_one_token():
    """No node of a GPT but its outputs and ends has more than one place, and no gamma is a matrix but that of
    the table used twice."""
    model, graph = BUILD["gpt"]()
    folded = fold(graph).graph
    apart = [k for k, node in enumerate(folded.nodes) if 7 in node.shape[1:]]
    readers = folded.readers()
    for k in apart:
        assert k in folded.ends or all(
            isinstance(folded.nodes[reader].operation, Reduce) for reader in readers[k]
        )
    found = measure_gammas(graph, graph.tensors(model))
    matrices = [n for n, gamma in found.items() if len(gamma.factors) == 1 and len(gamma.shape) == 2]
    assert matrices == ["tokens.weight"]
