"""Operators that move, choose and mix entries: rescalings keep the function, and paths are those of a matrix
that torch itself gives."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd.graph.export import tensors_in
from pathsgd.graph.rules import RULES
from pathsgd.graph.unit_classes import unit_classes_of

TIMES, UNITS = 4, 6


class Around(nn.Module):
    """A layer, an operator, a layer. ``body`` is given units (batch, times, units), and an input that may
    choose among them."""

    def __init__(self, body):
        super().__init__()
        self.a, self.b = nn.Linear(3, UNITS), nn.Linear(UNITS, 2)
        self.spare, self.table = nn.Linear(UNITS, UNITS), nn.Parameter(torch.randn(5, UNITS))
        self.body = body

    def forward(self, x, choice):
        y = self.body(self, choice, self.a(x).relu())
        return self.b(y[..., :UNITS])


def build(body):
    torch.manual_seed(5)
    model = Around(body).double()
    return model, (torch.randn(3, TIMES, 3).double(), torch.randn(3, TIMES, 3).double())


def chosen_times(x):
    return x.abs().mul(9).long().sum(-1) % TIMES


def chosen_units(x):
    return x.abs().mul(9).long().sum(-1, keepdim=True) % UNITS


def write_slices(net, x, h):
    y = h.new_empty(h.shape)
    y[:, 1:] = h[:, :-1]
    y[:, 0] = h[:, 3]
    y[..., ::2] = 2 * y[..., 1::2]
    return y


def as_image(h):
    return h.transpose(1, 2).reshape(len(h), UNITS, 2, 2)


def from_image(y):
    return y.flatten(2).transpose(1, 2)


MATRICES = {
    "repeat_interleave": lambda n, x, h: h.repeat_interleave(2, 1)[..., :3].repeat_interleave(2, -1),
    "slices that are written": write_slices,
    "tril": lambda n, x, h: h.tril(1).triu(-1),
    "unfold in time": lambda n, x, h: h.unfold(1, 3, 1).sum(-1),
    "im2col": lambda n, x, h: from_image(
        F.unfold(as_image(h), (2, 1), padding=(1, 0), stride=(2, 1)).view(-1, UNITS, 2, 4)
    ),
    "cumsum": lambda n, x, h: h.cumsum(1),
    "pieces": lambda n, x, h: torch.hstack(torch.tensor_split(torch.vstack([h, h]), 3, 1)[::-1]),
    "nan_to_num": lambda n, x, h: h.nan_to_num() + h.new_full((UNITS,), 0.0),
}  # fmt: skip
"""Operators that are one fixed matrix on the units."""

COUNTED = {
    "index": (lambda n, x, h: h[torch.arange(len(h)), chosen_times(x)[:, 0]], lambda h: h.mean(1)),
    "index of two axes": (
        lambda n, x, h: h.view(-1, 2, 2, UNITS)[
            :, chosen_times(x)[0, :1] % 2, :, chosen_units(x)[0, 0].expand(UNITS)
        ].permute(1, 2, 0),
        lambda h: h.view(-1, 2, 2, UNITS).mean((1, 3))[..., None].expand(-1, -1, UNITS),
    ),
    "index_select": (lambda n, x, h: h.index_select(1, chosen_times(x)[0, :2]),
                     lambda h: h.mean(1, keepdim=True).expand(-1, 2, -1)),
    "gather": (lambda n, x, h: h.gather(1, chosen_times(x)[..., None].expand_as(h)),
               lambda h: h.mean(1, keepdim=True).expand(-1, TIMES, -1)),
    "take_along_dim": (lambda n, x, h: h.take_along_dim(chosen_units(x), -1).expand_as(h),
                       lambda h: h.mean(-1, keepdim=True).expand(-1, -1, UNITS)),
    "scatter": (lambda n, x, h: (0 * h).scatter_add(1, chosen_times(x)[..., None].expand_as(h), h),
                lambda h: h.mean(1, keepdim=True).expand(-1, TIMES, -1)),
    "index_add": (
        lambda n, x, h: torch.zeros_like(h).index_add(1, chosen_times(x)[0, :2], h[:, :2], alpha=3),
        lambda h: h[:, :2].sum(1, keepdim=True).expand(-1, TIMES, -1) * 3 / TIMES,
    ),
    "index_put": (
        lambda n, x, h: torch.zeros_like(h).index_put((torch.arange(len(h)), chosen_times(x)[:, 0]), h[:, 1]),
        lambda h: h[:, 1:2].expand(-1, TIMES, -1) / TIMES,
    ),
    "grid_sample": (
        lambda n, x, h: from_image(F.grid_sample(as_image(h), x[:, :, None, :2], align_corners=False)),
        lambda h: h.mean(1, keepdim=True).expand(-1, TIMES, -1),
    ),
    "topk": (lambda n, x, h: h.topk(3, 1).values, lambda h: h.sum(1, keepdim=True).expand(-1, 3, -1)),
    "sort": (lambda n, x, h: h.sort(-1).values, lambda h: h.sum(-1, keepdim=True).expand(-1, -1, UNITS)),
    "median": (lambda n, x, h: h.median(1).values, lambda h: h.sum(1)),
    "aminmax": (lambda n, x, h: h.aminmax(dim=1).max, lambda h: h.sum(1)),
    "cummax": (lambda n, x, h: h.cummax(1).values, lambda h: h.cumsum(1)),
    "where": (lambda n, x, h: torch.where(x[..., :1] > 0, torch.where(x[..., 1:2] > 0, h, 0), -h.flip(1)),
              lambda h: h + h.flip(1)),
    "std": (lambda n, x, h: h.std(1, keepdim=True), lambda h: h.mean(1, keepdim=True)),
}  # fmt: skip
"""Operators whose entries depend on the input, each with the matrix that they count as."""

REST = {
    "the largest that are kept": lambda n, x, h: torch.where(h >= h.topk(3, -1).values[..., -1:], h, 0.0),
    "compared with zero": lambda n, x, h: torch.where(n.spare(h) > 0, h, 0.1 * h),
    "masks together": lambda n, x, h: h.masked_fill((x[..., :1] > 0.5) & ~(h > n.spare(h)), 0),
    "a sparse matrix": lambda n, x, h: h + torch.sparse.mm((x[0] @ x[0].t()).to_sparse(), h[0]),
    "a mask token": lambda n, x, h: torch.where(x[..., :1] > 0, n.spare(h), n.table[0]),
    "var": lambda n, x, h: h.var(1, keepdim=True),
    "rows of a table": lambda n, x, h: h + n.table[chosen_times(x)],
    "bags": lambda n, x, h: h.mean(1) + F.embedding_bag(chosen_times(x), n.table, mode="sum"),
    "a triangle of a weight": lambda n, x, h: h @ n.spare.weight.triu().t(),
    "written under a mask of two axes": lambda n, x, h: h.index_put(
        (torch.ones(len(h), TIMES, dtype=torch.bool),), n.table[0], accumulate=True
    ),
    "written by two indices": lambda n, x, h: torch.zeros_like(h).index_put(
        (torch.arange(len(h))[:, None], chosen_times(x)), n.spare(h), accumulate=True
    ),
    "put back": lambda n, x, h: F.max_unpool1d(
        *F.max_pool1d(n.spare(h).transpose(1, 2), 2, return_indices=True), 2
    ).transpose(1, 2),
    "resized positions": lambda n, x, h: h + F.interpolate(
        n.table.t()[None], size=TIMES, mode="linear"
    ).transpose(1, 2),
}  # fmt: skip
BODIES = {**MATRICES, **{name: body for name, (body, _) in COUNTED.items()}, **REST}


def fill_with_integers(net, x, h):
    counts = torch.zeros(h.shape, dtype=torch.long)
    return h * counts.fill_(h.mean().detach())


def in_two_contexts(net, x, h):
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        y = net.spare(h).relu()
    return y + h


def branch_in_a_branch(net, x, h):
    def inner(h):
        return torch.cond(x.mean() > 1, net.spare, lambda h: h.relu(), (h,))

    return torch.cond(x.sum() > 0, inner, lambda h: h.abs(), (h,))


ODD = {
    "integers": fill_with_integers,
    "a sum of integers": lambda n, x, h: h + h.detach().sum(-1, keepdim=True, dtype=torch.long),
    "a number that is reduced": lambda n, x, h: h * h.sum().sum(0),
    "no places": lambda n, x, h: n.spare(h) + h[:, :0].reshape(0, 3, 2).sum(),
    "no units": lambda n, x, h: n.spare(h) + h[..., :0] @ n.table[:0],
    "pieces of nothing": lambda n, x, h: h + sum(piece.sum() for piece in h[:, :0].split(0, 1)),
    "addbmm": lambda n, x, h: h + torch.addbmm(n.table[:TIMES], h[:1].expand(2, -1, -1), h.new_ones(2, 6, 6)),
    "two contexts": in_two_contexts,
    "a branch in a branch": branch_in_a_branch,
    "complex constants": lambda n, x, h: h * torch.zeros(UNITS, dtype=torch.complex128).add(1j).abs(),
    "filled with a unit": lambda n, x, h: h.index_fill(-1, chosen_units(x)[0, :2, 0], h.sum().detach()),
    "queries of fewer axes": lambda n, x, h: F.scaled_dot_product_attention(h, n.spare(h)[None], h)[0],
    "a weight for each group": lambda n, x, h: torch.einsum(
        "btgk,gkn->btgn", h.view(-1, TIMES, 2, 3), n.spare.weight.view(2, 3, UNITS)
    ).sum(2),
}  # fmt: skip
"""Arguments that rules do not take, and corners of those that they do."""


@pytest.mark.parametrize("name", ODD)
def test_corners_are_traced_and_keep_the_function(name):
    model, x = build(ODD[name])
    graph = pathsgd.trace(model, x)
    pathsgd.path_norm(model, graph, region=0), pathsgd.gammas(model, graph)
    with torch.no_grad():
        before = model(*x)
        if len(unit_classes_of(graph).free):
            pathsgd.unbalance(model, graph, units=200)
        assert (model(*x) - before).abs().max() <= 1e-10 * before.abs().max()


@functools.cache
def traced(name):
    return pathsgd.trace(*build(BODIES[name]))


def phi(model, matrix, p):
    """phi_p of a layer, a matrix and a layer, without biases: by products of powers."""
    a = model.a.weight.detach().abs() ** p
    ones = (torch.ones(TIMES, 3, dtype=torch.float64) @ a.t()).flatten()
    y = (matrix.abs() ** p @ ones).view(-1, UNITS)
    return (y @ (model.b.weight.detach().abs() ** p).t()).sum().item() ** (1 / p)


def matrix_of(body):
    rows = torch.autograd.functional.jacobian(body, torch.rand(1, TIMES, UNITS, dtype=torch.float64) + 1)
    return rows.reshape(-1, TIMES * UNITS)


def check_rescaling(model, x, graph):
    """Returns which parameters a rescaling moves, and by how much it moves the output."""
    before, rescaled = model(*x).detach(), copy.deepcopy(model)
    units = unit_classes_of(graph)
    pathsgd.unbalance(rescaled, graph, units=4 * units.count, generator=torch.Generator().manual_seed(0))
    pairs = zip(model.named_parameters(), rescaled.parameters(), strict=True)
    moved = {name for (name, p), q in pairs if not torch.equal(p, q)}
    return moved, ((rescaled(*x) - before).abs().max() / before.abs().max()).item()


@pytest.mark.parametrize("name", BODIES)
def test_units_before_and_behind_are_rescaled_together(name):
    model, x = build(BODIES[name])
    graph = traced(name)
    moved, change = check_rescaling(model, x, graph)
    assert change <= 1e-10
    assert {"a.weight", "a.bias", "b.weight"} <= moved


def test_a_unit_that_is_compared_with_a_number_stays():
    model, x = build(lambda n, x, h: n.spare(torch.where(h > 0.5, h, 0)).relu())
    moved, change = check_rescaling(model, x, pathsgd.trace(model, x))
    assert change <= 1e-10
    assert moved == {"spare.weight", "spare.bias", "b.weight"}


def test_wrong_rules_are_noticed(monkeypatch):
    """Units that are sorted without being tied, and sums that leave entries out."""

    def pass_on(b, call):
        return [call.paths("self")]

    for name in ("sort", "cumsum"):
        monkeypatch.setitem(RULES, name, dataclasses.replace(RULES[name], write=pass_on))
    model, x = build(BODIES["sort"])
    assert check_rescaling(model, x, pathsgd.trace(model, x))[1] > 1e-3
    model, x = build(MATRICES["cumsum"])
    with torch.no_grad():
        model.a.bias.zero_(), model.b.bias.zero_()
    matrix = matrix_of(lambda h: h.cumsum(1))
    assert abs(pathsgd.path_norm(model, x, p=1).item() / phi(model, matrix, 1) - 1) > 1e-3


@pytest.mark.parametrize("name", [*MATRICES, *COUNTED])
def test_paths_are_those_of_the_matrix(name):
    body, counts_as = COUNTED.get(name, (MATRICES.get(name), None))
    model, x = build(body)
    with torch.no_grad():
        model.a.bias.zero_(), model.b.bias.zero_(), model.spare.bias.zero_(), model.spare.weight.zero_()
    graph = traced(name)
    matrix = matrix_of(counts_as or (lambda h: body(model, x[1], h)[..., :UNITS]))
    for p in (1, 2, 3):
        found = pathsgd.path_norm(model, graph, p, region=0).item()
        assert found == pytest.approx(phi(model, matrix, p), rel=1e-12)


class Gated(nn.Module):
    """A layer of ReLU units, a recurrent layer, a layer."""

    def __init__(self, kind, **options):
        super().__init__()
        self.a, self.rnn = nn.Linear(3, UNITS), kind(UNITS, 5, batch_first=True, **options)
        width = (options.get("proj_size") or 5) * (1 + bool(options.get("bidirectional")))
        self.b, self.start = nn.Linear(width, 2), nn.Linear(3, 5)

    def forward(self, x):
        inputs, begun = self.a(x).relu(), self.start(x[:, 0])[None]
        if self.rnn.num_layers > 1:
            return self.b(self.rnn(inputs)[0])
        if isinstance(self.rnn, nn.LSTM):
            begun = begun[..., : self.rnn.proj_size or 5], begun
        outputs, state = self.rnn(inputs, begun)
        return self.b(outputs), state


class Cell(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.cell, self.b = nn.Linear(3, UNITS), kind(UNITS, UNITS), nn.Linear(UNITS, 2)

    def forward(self, x):
        state = None
        for t in range(2):
            state = self.cell(self.a(x[:, t]).relu(), state)
        return self.b(state[0] if isinstance(state, tuple) else state)


RELU_CELL = functools.partial(nn.RNNCell, nonlinearity="relu")
RECURRENT = [
    (Gated(nn.LSTM), 6),
    (Gated(nn.LSTM, num_layers=2, bidirectional=True, bias=False), 6),
    (Gated(nn.LSTM, num_layers=2, proj_size=3, bidirectional=True), 6 + 4 * 3),
    (Gated(nn.LSTM, proj_size=3), 6),
    (Gated(nn.GRU, num_layers=2), 6),
    (Gated(nn.GRU), 6),
    (Gated(nn.RNN), 6),
    (Gated(nn.RNN, num_layers=2, bidirectional=True, nonlinearity="relu"), 6 + 4 * 5),
    (Cell(nn.LSTMCell), 6),
    (Cell(nn.GRUCell), 6),
    (Cell(nn.RNNCell), 6),
    (Cell(RELU_CELL), 6 + 6),
]
"""Recurrent layers, and how many units before and in them can be rescaled. One layer begins with a state that
is not zero, and returns its last, which is then an output."""


@pytest.mark.parametrize(("model", "count"), RECURRENT)
def test_units_around_recurrent_layers(model, count):
    model, x = copy.deepcopy(model).double(), torch.randn(3, 3, 3, dtype=torch.float64)
    graph = pathsgd.trace(model, x)
    assert unit_classes_of(graph).count - 1 == count
    before, rescaled = tensors_in(model(x)), copy.deepcopy(model)
    pathsgd.unbalance(rescaled, graph, units=4 * count)
    assert not torch.equal(rescaled.a.weight, model.a.weight)
    for a, b in zip(before, tensors_in(rescaled(x)), strict=True):
        assert (a - b).abs().max() <= 1e-10
