"""A model of which no part can be traced is trained all the same, and the table says so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import BalancedMuon, PathSGD
from pathsgd.errors import DataDependentError


class Actor(nn.Module):
    """A distribution checks its arguments."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 16), nn.ReLU()), nn.Linear(16, 3)

    def forward(self, x):
        return torch.distributions.Categorical(logits=self.head(self.body(x)), validate_args=True).logits


class Readout(nn.Module):
    """As many rows as there are graphs."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(7, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        nodes, graphs = x.unbind(1)
        pooled = torch.zeros(int(graphs.max()) + 1, 16).index_add(0, graphs, self.body(self.embed(nodes)))
        return self.head(pooled.relu())


def batch(model):
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, Readout):
        x = torch.stack([torch.randint(7, (32,), generator=generator), torch.arange(32) // 4], 1)
        return x, torch.arange(8) % 3
    return torch.randn(32, 4, generator=generator), torch.arange(32) % 3


@pytest.fixture(params=[Actor, Readout], ids=lambda cls: cls.__name__)
def model(request):
    torch.manual_seed(0)
    return request.param()


@pytest.mark.parametrize("at_once", [True, False], ids=["example", "first batch"])
def test_it_is_trained_and_said(model, at_once):
    x, y = batch(model)
    if at_once:
        with pytest.warns(UserWarning, match="no parameter is path-normalised.*depend on values"):
            optimizer = BalancedMuon(model, x)
    else:
        optimizer = BalancedMuon(model)
    before = copy.deepcopy(model.state_dict())
    losses = []
    for k in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if k == 0 and at_once:  # nothing was balanced
            assert all(map(torch.equal, model.state_dict().values(), before.values()))
        if k == 0 and not at_once:
            with pytest.warns(UserWarning, match="no parameter is path-normalised"):
                optimizer.step()
        else:
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert "0 of" in str(optimizer.graph)
    assert "could not be traced" in str(optimizer.graph)
    assert "depend on values" in str(optimizer.graph)


@pytest.mark.filterwarnings("ignore:no parameter is path-normalised")
def test_matrices_turn(model):
    """A step is lr long for every matrix, whatever its size."""
    x, y = batch(model)
    scaled = copy.deepcopy(model)
    for p in scaled.parameters():
        p.data.mul_(3)
    for module in (model, scaled):
        optimizer = BalancedMuon(module, x, lr=0.05, growth=0, weight_decay=0)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        for name, p in module.named_parameters():
            if p.dim() > 1 and "embed" not in name and p.grad is not None and p.grad.any():
                cosine = nn.functional.cosine_similarity(before[name].flatten(), p.detach().flatten(), dim=0)
                assert torch.acos(cosine).item() == pytest.approx(0.05, rel=0.1), name
                assert p.norm().item() == pytest.approx(before[name].norm().item(), rel=1e-4)


def test_what_needs_paths_is_an_error(model):
    x, _ = batch(model)
    for call in (pathsgd.trace, pathsgd.path_norm, PathSGD):
        with pytest.raises(DataDependentError, match="depend on values"):
            call(model, x)


@pytest.mark.filterwarnings("ignore:no parameter is path-normalised")
def test_a_wrong_example_is_still_an_error():
    with pytest.raises(pathsgd.TraceError, match="check that example_input"):
        BalancedMuon(nn.Sequential(nn.Linear(4, 3)), torch.ones(2, 5))
