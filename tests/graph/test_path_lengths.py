"""What is alone on its paths, entry by entry: by what gamma depends on, in the report, and for rescalings."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd.graph import path_lengths, views
from support import cases
from support.networks import Transformer, build, dense_gammas


class Attention(nn.Module):
    """Queries, keys, values and output in separate matrices, then a ReLU MLP; residual."""

    example = (1, 5, 6)

    def __init__(self, norm=nn.Identity, activation=F.relu):
        super().__init__()
        self.norm, self.activation = norm(), activation
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        return x + self.down(self.activation(self.up(self.norm(x))))


class WithNorm(Attention):
    def __init__(self):
        super().__init__(lambda: nn.LayerNorm(6))


class WithNormAndGelu(Attention):
    def __init__(self):
        super().__init__(lambda: nn.LayerNorm(6), F.gelu)


class Packed(nn.Module):
    example = (1, 5, 8)

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class PackedByHand(nn.Module):
    """The rows of three matrices interleaved, and views of the matrix itself instead of its output."""

    example = (1, 5, 8)

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(24, 8)), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.weight.unflatten(0, (8, 3)).unbind(1)
        return self.out(F.scaled_dot_product_attention(x @ q.t(), x @ k.t(), x @ v.t()))


class Router(nn.Module):
    """A mixture of two experts."""

    example = (1, 5, 4)

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(2)
        )

    def forward(self, x):
        share = self.router(x).softmax(-1)
        return x + sum(share[..., k, None] * expert(x) for k, expert in enumerate(self.experts))


class Language(nn.Module):
    """Embeddings, one block, a norm and a head."""

    def __init__(self, activation="relu", tied=False):
        super().__init__()
        self.table, self.places = nn.Embedding(9, 8), nn.Parameter(torch.randn(5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 32, 0.0, activation, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 9, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.norm(self.layer(self.table(tokens) + self.places)))


class Squared(nn.Module):
    """One layer and a square: every path has the layer twice."""

    example = (1, 4)

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x):
        return self.a(x).relu().square()


TOKENS = torch.zeros(1, 5, dtype=torch.long)
ATTENTION = [Attention, WithNorm, WithNormAndGelu, Packed, PackedByHand, Router, Transformer, Language]
SLICED = [Squared, cases.Concatenated, cases.Embedded, cases.Tied, cases.ByHand, cases.Transposed]


def make(network):
    if network in cases.CASES:
        model = cases.build(network)
        return model, model.example()
    if network is Language:
        torch.manual_seed(0)
        return Language().double().eval(), TOKENS
    return build(network)


def redraw(model):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    return other


def count_constant(model, graph):
    """By matrix or kernel, the entries of rows whose gamma does not change when parameters are drawn anew."""
    first, second = (dense_gammas(redraw(model), graph) for _ in range(2))
    matrices = [name for name, info in graph.parameters.items() if {"weight", "embedding"} & set(info.roles)]
    # gamma is 0 where nothing reads a unit, whatever the weights.
    same = {
        name: (torch.isclose(first[name], second[name], rtol=1e-12) & (first[name] > 0)).flatten(1)
        for name in matrices
    }
    return {name: int(rows.all(1).sum()) * rows.shape[1] for name, rows in same.items()}


@pytest.mark.parametrize("network", [*SLICED, *ATTENTION])
def test_alone_is_what_gamma_does_not_depend_on(network):
    """gamma of an entry is a constant if no other weight lies on its paths."""
    model, x = make(network)
    graph = pathsgd.trace(model, x)
    infos = graph.parameters
    for name, found in count_constant(model, graph).items():
        assert infos[name].alone == found, name


def test_the_comparison_can_fail(monkeypatch):
    """A pass that takes a slice for the whole does not tell queries from values."""
    whole = lambda view, y, before, after, *_: path_lengths._zeros(len(before))  # noqa: E731
    monkeypatch.setattr(path_lengths, "undo_view", whole)
    with pytest.raises(AssertionError):
        test_alone_is_what_gamma_does_not_depend_on(Packed)


@pytest.mark.parametrize("network", ATTENTION)
def test_no_rescaling_changes_what_is_alone(network):
    model, x = make(network)
    graph = pathsgd.trace(model, x)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gammas = dense_gammas(model, graph)
    for owner in [name for name, info in graph.parameters.items() if info.normalised]:
        for unit in range(2):
            try:
                pathsgd.rescale(model, graph, {(owner, unit): 3.0})
            except pathsgd.RescaleError:
                continue
    after = dense_gammas(model, graph)
    for name, info in graph.parameters.items():
        if info.status is pathsgd.ParameterStatus.ALONE:
            assert torch.equal(before[name], model.get_parameter(name)), name
            assert torch.equal(gammas[name], after[name]), name


def test_a_norm_before_queries_is_company():
    """Rescaling a channel of the norm changes queries and keys, so they cannot fall back to gamma = 1."""
    model, x = build(WithNorm)
    graph = pathsgd.trace(model, x)
    before, gamma = model(x).detach(), dense_gammas(model, graph)["q.weight"]
    pathsgd.rescale(model, graph, {("norm.weight", 2): 4.0})
    assert torch.allclose(before, model(x), rtol=1e-10)
    after = dense_gammas(model, graph)["q.weight"]
    assert torch.allclose(after[:, 2], 16 * gamma[:, 2])
    info = graph.parameters["q.weight"]
    assert (info.normalised, info.alone) == (True, 0)


def verdicts(graph):
    lines = str(graph).splitlines()
    start = lines[2].index("path-normalised")
    return {line.split()[0]: line[start:] for line in lines[4 : 4 + len(graph.parameters)]}


ALONE = "no: alone on its paths, so optimizers take gamma = 1"


def test_the_report_tells_alone_from_shared():
    model, x = build(Attention)
    found = verdicts(pathsgd.trace(model, x))
    assert {name for name, said in found.items() if said == ALONE} == {
        "q.weight", "q.bias", "k.weight", "k.bias",
    }  # fmt: skip
    assert {said for said in found.values() if said != ALONE} == {"yes"}
    model, x = build(Router)
    found = verdicts(pathsgd.trace(model, x))
    assert [name for name, said in found.items() if said == ALONE] == ["router.weight", "router.bias"]
    model, x = build(Packed)
    found = verdicts(pathsgd.trace(model, x))
    assert found["attention.in_proj_weight"] == "yes, 2/3 of its rows alone"
    assert found["attention.in_proj_bias"] == "yes, 2/3 of its entries alone"
    assert found["attention.out_proj.bias"] == "yes"
    found = verdicts(pathsgd.trace(Language(), TOKENS))
    assert found["table.weight"] == found["places"] == ALONE
    assert found["layer.self_attn.in_proj_weight"] == found["head.weight"] == "yes"
    frozen = build(Packed)[0].requires_grad_(False)
    assert verdicts(pathsgd.trace(frozen, x.new_zeros(Packed.example)))["attention.in_proj_weight"] == (
        "yes (frozen), 2/3 of its rows alone"
    )


@pytest.mark.parametrize("length", [5, 32])
def test_gamma_of_what_is_alone_is_its_number_of_places(length):
    model, _ = build(Attention)
    gamma = dense_gammas(model, torch.zeros(1, length, 6))
    assert all(gamma[name].eq(length).all() for name in ("q.weight", "q.bias", "k.weight", "k.bias"))
    sigmoid = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid())
    assert dense_gammas(sigmoid, torch.zeros(1, length, 6))["0.weight"].eq(length).all()


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 5, 24), (5, 3, 8)), ((2, 3), (6,)), ((6,), (1, 2, 3, 1)), ((), (1,)), ((0, 3), (3, 0))],
)
def test_reshaping_without_writing_out(before, after):
    """As on the whole tensor, whichever axes it changes on."""
    for varying in range(2 ** len(before)):
        sizes = [n if varying >> d & 1 else min(n, 1) for d, n in enumerate(before)]
        x = torch.randint(0, 3, sizes, dtype=torch.int8)
        found = views.reshape_compressed(x, before, after)
        assert torch.equal(found.expand(after), x.expand(before).reshape(after))


class RmsNorm(nn.Module):
    """As language models write it out."""

    def __init__(self, width, square=torch.square):
        super().__init__()
        self.weight, self.square = nn.Parameter(torch.ones(width)), square

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(self.square(x).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("square", [torch.square, lambda x: x.pow(2), lambda x: x * x])
def test_a_norm_that_is_written_out_is_a_norm(square):
    """Its mean square is no path: the layers before it have the gamma they have before torch's own."""
    found = []
    for norm in (nn.RMSNorm(6), RmsNorm(6, square)):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), norm, nn.Linear(6, 6), copy.copy(norm)
        )
        graph = pathsgd.trace(model.double(), torch.zeros(1, 5, 6))
        found.append((dense_gammas(model, graph), [info.status for info in graph.parameters.values()]))
    (expected, statuses), (gammas, own) = found
    assert statuses == own
    assert all(torch.equal(gammas[name], expected[name]) for name in expected)
