"""What may be given as an example of the inputs: batches, several arguments, other devices and precisions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from support.networks import NETWORKS, build, dense_gammas
from support.traced import normalised


@pytest.mark.parametrize("network", NETWORKS)
def test_the_batch_does_not_count(network):
    model, x = build(network)
    one = dense_gammas(model, x[:1])
    for batch in (x, x[:0]):
        found = dense_gammas(model, batch)
        assert all(torch.equal(found[name], one[name]) for name in one)


def test_positions_do_count():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    one = dense_gammas(model, torch.randn(2, 1, 3))["0.weight"]
    five = dense_gammas(model, torch.randn(2, 5, 3))["0.weight"]
    assert torch.allclose(five, 5 * one)


def test_a_batch_that_is_fixed_in_the_code_is_said_so():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(x).view(5, 4).relu())

    assert "could not be cut" in str(pathsgd.trace(Fixed(), torch.randn(5, 3)))
    unbatched = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    assert "could not be cut" in str(pathsgd.trace(unbatched, torch.randn(3, 8, 8)))
    assert "could not be cut" not in str(pathsgd.trace(unbatched, torch.randn(3, 8, 8), batch_dim=None))


def test_time_first_layers_are_pointed_out():
    """Whether axis 0 is time or batch cannot be seen from outside, so the report says how to say it."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 2))
    graph = pathsgd.trace(model, torch.randn(5, 3, 8))
    assert "'0.self_attn' (MultiheadAttention) takes time first" in str(graph)
    assert "batch_dim=1" in str(graph)
    assert not pathsgd.trace(model, torch.randn(5, 3, 8), batch_dim=1).notes


def test_keyword_inputs_and_several_inputs_and_outputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.out = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

        def forward(self, x, *, y, flag=True):
            h = (self.left(x) + self.right(y)).relu()
            return {"out": self.out(h), "hidden": [h]} if flag else h

    model = Pair().double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    graph = pathsgd.trace(model, {"x": x, "y": y})
    assert normalised(graph) == set(graph.parameters)
    assert [tuple(t.shape) for t in pathsgd.path_norm(model, graph, per_output=True)] == [(1, 2), (1, 4)]
    gamma = dense_gammas(model, graph)
    expected = (model.out.weight**2).sum(0) + 1  # the hidden units are outputs too
    assert torch.allclose(gamma["left.bias"], expected.detach())


def test_an_example_on_another_device_will_do():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to("meta")
    assert normalised(pathsgd.trace(model, torch.randn(1, 3))) == set(dict(model.named_parameters()))


class Convolution(nn.Module):
    """Rolls dice in training mode if it is told to, which export cannot follow."""

    def __init__(self, dice=False):
        super().__init__()
        self.dice, self.a, self.b = dice, nn.Conv1d(1, 3, 3), nn.Linear(6, 2)

    def forward(self, x):
        x = self.a(x).relu()
        if self.dice and self.training and torch.rand([]) < 0.5:
            x = 2 * x
        return self.b(x.flatten(1))


@pytest.mark.parametrize("dice", [False, True])
@pytest.mark.parametrize(
    ("precision", "other"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_an_example_in_another_precision_will_do(dice, precision, other):
    model, x = Convolution(dice).to(precision), torch.zeros(2, 1, 4)
    assert str(pathsgd.trace(model, x.to(other))) == str(pathsgd.trace(model, x.to(precision)))


def test_the_error_is_not_about_precision_if_that_was_not_all():
    with pytest.raises(pathsgd.TraceError, match=r"'b' \(Linear\)"):
        pathsgd.trace(Convolution().bfloat16(), torch.zeros(2, 1, 5))


class TakesDouble(nn.Module):
    """Casts by itself, and would not take an input that was cast before."""

    def __init__(self):
        super().__init__()
        self.smooth, self.a = nn.Conv1d(1, 1, 3).double().requires_grad_(False), Convolution()
        self.first = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.a(self.smooth(x).float() * self.first)


def test_an_example_that_will_do_is_not_cast():
    graph = pathsgd.trace(TakesDouble(), torch.zeros(2, 1, 6, dtype=torch.float64))
    assert {"a.a.weight", "a.b.weight"} <= normalised(graph)


class Positions(nn.Module):
    """Takes as many rows of its table as there are positions."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.table, self.mixing = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(9, 9))

    def forward(self, x):
        n = x.shape[1]
        h = (self.a(x) + self.table[:n]).relu()
        return self.b(self.mixing[:n, :n].tril() @ h)


class Steps(nn.Module):
    """Recurrences from a state of zeros."""

    def __init__(self):
        super().__init__()
        self.rnn, self.cell = nn.RNN(3, 4, nonlinearity="relu", batch_first=True), nn.LSTMCell(4, 4)
        self.again, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x):
        h, cell, state = torch.zeros(len(x), 4, dtype=x.dtype), None, []
        for y in self.rnn(x)[0].unbind(1):
            cell = self.cell(y, cell)
            h = (cell[0] + self.again(h)).relu()
            state.append(h)
        return self.b(torch.stack(state, 1))


@pytest.mark.parametrize("kind", [Positions, Steps])
@pytest.mark.parametrize("length", [1, 4])
def test_longer_sequences_than_the_example(kind, length):
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(2, 7, 3, dtype=torch.float64)
    rescaled, graph = copy.deepcopy(model), pathsgd.trace(model, x[:, :length])
    if kind is Steps and length == 1:
        assert "multiplied by nothing but zeros" in graph.parameters["again.weight"].reason
    else:
        pathsgd.unbalance(rescaled, graph, units=100)
    torch.testing.assert_close(rescaled(x), model(x), rtol=1e-10, atol=1e-10)


class Cached(nn.Module):
    """Attention that returns its keys and values, as decoders of transformers do with ``use_cache``."""

    def __init__(self, key):
        super().__init__()
        self.key, self.q, self.k, self.v, self.o = key, *(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x) for layer in (self.q, self.k, self.v))
        y = self.o(nn.functional.scaled_dot_product_attention(q, k, v))
        return {"logits": y, self.key: ((k, v),)} if self.key else {"logits": y}


def test_a_cache_fixes_no_units():
    """Steps would depend on use_cache, which is on by default: by 0.2 after five of a small GPT-2."""
    x = torch.zeros(2, 3, 4)
    graphs = {key: str(pathsgd.trace(Cached(key), x)) for key in ("past_key_values", "", "keys")}
    assert graphs["past_key_values"] == graphs[""] != graphs["keys"]
