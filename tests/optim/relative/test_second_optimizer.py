"""fallback= moves what the report calls fallen back, as that optimizer alone does; what is refused."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import PathAdam, PathMuon, PathNormalized
from support.networks import Mlp

both = pytest.mark.parametrize("make", [PathAdam, PathMuon])
MAKERS = [PathAdam, PathMuon, functools.partial(PathNormalized, torch.optim.Adam, lr=1e-3)]


class Attention(nn.Module):
    """Queries and keys enter a softmax, alone; values and what follows them share paths."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = x + self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        return self.head(x + self.down(F.relu(self.up(x))))


def build():
    torch.manual_seed(0)
    return Attention().double(), torch.randn(4, 5, 8, dtype=torch.float64)


def backward(model, x):
    model.zero_grad()
    y = model(x).flatten(0, 1)
    F.cross_entropy(y, torch.arange(len(y)) % 3).backward()


def fallen_back(graph):
    """The parameters that the report says "no" to."""
    rows = [line.split() for line in str(graph).splitlines()]
    names = set(graph.parameters)
    return {row[0] for row in rows if row and row[0] in names and "no:" in row}


def test_the_report_says_no_to_some():
    model, x = build()
    assert fallen_back(pathsgd.trace(model, x)) == {"q.weight", "q.bias", "k.weight", "k.bias"}


@pytest.mark.parametrize("make", MAKERS)
def test_a_second_optimizer_moves_what_falls_back_as_it_does_alone(make):
    model, x = build()
    optimizer = make(model, x[:1], fallback=torch.optim.SGD, fallback_lr=0.1)
    names = fallen_back(optimizer.graph)
    for _ in range(3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        backward(model, x)
        optimizer.step()
        for name, p in model.named_parameters():
            plain = before[name].add(p.grad, alpha=-0.1)
            assert torch.equal(p, plain) == (name in names), name


@pytest.mark.parametrize("make", MAKERS)
def test_adamw_as_the_second(make):
    """With state of its own: the same weights as AdamW alone, given the same gradients."""
    model, x = build()
    optimizer = make(model, x[:1], fallback=torch.optim.AdamW, fallback_lr=1e-2)
    names = sorted(fallen_back(optimizer.graph))
    alone = {name: model.get_parameter(name).detach().clone() for name in names}
    other = torch.optim.AdamW(alone.values(), lr=1e-2)
    for _ in range(4):
        backward(model, x)
        for name in names:
            alone[name].grad = model.get_parameter(name).grad.clone()
        optimizer.step()
        other.step()
    assert all(torch.equal(model.get_parameter(name), alone[name]) for name in names)


@pytest.mark.parametrize("make", MAKERS)
def test_a_rate_alone_makes_a_group_of_the_same_optimizer(make):
    model, x = build()
    optimizer = make(model, x[:1], fallback_lr=0.0)
    assert optimizer.fallback is None
    assert [len(group["params"]) for group in optimizer.param_groups] == [10, 4]
    names = fallen_back(optimizer.graph)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    backward(model, x)
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in names), name


@pytest.mark.parametrize("make", MAKERS)
def test_both_resume_and_follow_a_schedule(make):
    model, x = build()

    def start(model):
        optimizer = make(model, x[:1], fallback=torch.optim.AdamW, fallback_lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def train(model, optimizer, scheduler):
        for _ in range(3):
            backward(model, x)
            optimizer.step()
            scheduler.step()

    optimizer, scheduler = start(model)
    train(model, optimizer, scheduler)
    assert optimizer.param_groups[-1]["lr"] == pytest.approx(1e-2 / 8)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = build()[0]
    other.load_state_dict(loaded[0])
    resumed, rescheduled = start(other)
    resumed.load_state_dict(loaded[1])
    rescheduled.load_state_dict(loaded[2])
    copied = copy.deepcopy(optimizer)
    train(model, optimizer, scheduler)
    train(other, resumed, rescheduled)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    backward(model, x)
    optimizer.step()
    assert any(copied.state[p] for group in copied.param_groups for p in group["params"])


@both
def test_a_lazily_traced_model_is_refused(make):
    model, _ = build()
    with pytest.raises(TypeError, match=r"fallback needs to know which parameters fall back: pass example"):
        make(model, fallback=torch.optim.SGD)


@both
def test_without_anything_that_falls_back_there_is_no_second(make):
    model = Mlp()
    assert make(model, torch.zeros(1, 6), fallback=torch.optim.SGD, fallback_lr=0.1).fallback is None


@both
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_relative_step": 0.1}, "max_relative_step is for plain steps"),
        ({"coordinates": "gamma"}, "Invalid coordinates: 'gamma'"),
        ({"growth": -1.0}, "Invalid growth value: -1.0"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ({"betas": (0.9, 1.0)}, "[Ii]nvalid beta"),
    ],
)
def test_options_out_of_their_range_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(Mlp(), torch.zeros(1, 6), **options)


@both
def test_a_group_cannot_have_its_own_geometry(make):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = make(model, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="'p' cannot differ between groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "p": 1})
