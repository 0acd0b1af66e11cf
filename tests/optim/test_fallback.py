"""What falls back to gamma = 1 is what the report says, and a model that mostly does is announced."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import PathAdagrad, PathAdam, PathMuon, PathNormalized, PathSGD
from pathsgd.graph.small_share import explain_small_share
from support.networks import NETWORKS, build, dense_gammas


class Block(nn.Module):
    """Attention without a norm and an MLP, on a residual stream."""

    def __init__(self, activation=F.relu):
        super().__init__()
        self.activation = activation
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = x + self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        return x + self.down(self.activation(self.up(x)))


class Gpt(nn.Module):
    def __init__(self, activation, tokens=11, tied=False):
        super().__init__()
        self.table = nn.Embedding(tokens, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 32, 0.0, activation, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, tokens)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.norm(self.layer(self.table(x))))


def mlp(activation):
    return nn.Sequential(nn.Linear(3, 8), activation, nn.Linear(8, 8), activation, nn.Linear(8, 2))


@pytest.mark.parametrize("length", [3, 7])
def test_fallback_lr_acts_on_what_the_report_calls_fallen_back(length):
    """Whatever the length: gamma of queries and keys would be the number of positions."""
    torch.manual_seed(0)
    model = Block().double()
    x = torch.randn(2, length, 4, dtype=torch.float64)
    optimizer = PathSGD(model, x[:1], lr=1e-3, fallback_lr=1e-2)
    gammas = dense_gammas(model, optimizer.graph)
    rows = {line.split()[0]: line.split()[4] for line in str(optimizer.graph).splitlines()[3:15]}
    assert {name for name, said in rows.items() if said == "no:"} == {
        "q.weight", "q.bias", "k.weight", "k.bias",
    }  # fmt: skip
    before = copy.deepcopy(model)
    model(x).square().sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        rate = 1e-3 / gammas[name] if rows[name] == "yes" else 1e-2
        expected = before.get_parameter(name) - rate * parameter.grad
        assert torch.allclose(parameter, expected, rtol=1e-12, atol=1e-14), name


def plain_adam(model, *example, **options):
    return PathNormalized(torch.optim.Adam, model, *example, **options)


@pytest.mark.parametrize("make", [plain_adam, PathAdagrad, PathSGD])
def test_what_is_alone_does_not_notice_the_length(make):
    """The same gradients at two lengths move queries alike, and values not."""
    moved = []
    for length in (3, 12):
        torch.manual_seed(0)
        model = Block().double()
        optimizer = make(model, torch.zeros(1, length, 4), lr=1e-3)
        before = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moved.append(
            [before.get_parameter(name) - model.get_parameter(name) for name in ("q.weight", "down.weight")]
        )
    assert torch.equal(moved[0][0], moved[1][0])
    assert not torch.allclose(moved[0][1], moved[1][1], rtol=0.1)


OPTIMIZERS = [
    PathSGD,
    plain_adam,
    PathAdagrad,
    lambda model, *example: PathNormalized(torch.optim.SGD, model, *example, lr=0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_construction_warns_once(make):
    with pytest.warns(UserWarning, match="none of the 104 trainable weights of Sequential") as caught:
        optimizer = make(mlp(nn.Tanh()), torch.zeros(1, 3))
    (warning,) = caught
    assert warning.filename == __file__
    message = str(warning.message)
    assert "What cuts them off: tanh (104 weights)." in message
    assert "Replace tanh by relu, leaky_relu or a squared relu" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))


def test_the_first_step_warns_where_no_example_was_given():
    model = Gpt("gelu")
    optimizer = PathSGD(model, lr=1e-3)
    for batch in range(2):
        model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
        if batch:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match="only 22% of the 888 trainable weights of Gpt") as caught:
                optimizer.step()
            (warning,) = caught
            assert warning.filename == __file__
            assert "gelu" in str(warning.message)
            assert "queries and keys of attention enter a softmax" in str(warning.message)


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_on_paths_are_not_announced(network):
    model, x = build(network)
    assert explain_small_share(pathsgd.trace(model, x[:1])) is None


@pytest.mark.parametrize("tied", [True, False])
def test_large_vocabularies_are_not_announced(tied):
    """Of a thousand tokens' embeddings and heads most weights are, and no activation changes that."""
    tokens = torch.zeros(1, 5, dtype=torch.long)
    assert explain_small_share(pathsgd.trace(Gpt("relu", 1000, tied), tokens)) is None
    assert explain_small_share(pathsgd.trace(Gpt("gelu", 1000, tied), tokens)) is not None


def test_messages_for_other_causes():
    def explain(model, *shape):
        return explain_small_share(pathsgd.trace(model, torch.zeros(1, *shape)))

    assert "What cuts them off: lstm (" in explain(nn.LSTM(3, 4, batch_first=True), 5, 3)
    single = explain(nn.Sequential(nn.Linear(3, 2)), 3)
    assert "What cuts them off" not in single
    assert "Take PathMuon or PathAdam" in single
    # A part of the network that is frozen is not counted, but its weights are company.
    probe = mlp(nn.ReLU())
    probe[:3].requires_grad_(False)
    assert explain(probe, 3) is None


@pytest.mark.parametrize("make", [PathAdam, PathMuon])
def test_an_optimizer_that_trains_what_falls_back_does_not_warn(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(mlp(nn.GELU()), torch.zeros(1, 3))
