"""A model that cannot be traced as a whole: the modules that can be are, and nothing that is rescaled there
shows outside of them."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd.graph.recording import Recorder
from pathsgd.graph.structure import ParameterStatus
from pathsgd.graph.unit_classes import unit_classes_of


def mlp(width=4):
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width))


class Branching(nn.Module):
    """Cannot be traced as a whole."""

    def __init__(self):
        super().__init__()
        self.part = mlp()

    def forward(self, x):
        y = self.body(x)
        return y if y.sum() > 1e9 else y + 1

    def body(self, x):
        return self.part(x)


class Experts(Branching):
    """Every row goes to two of four experts."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 4), nn.ModuleList(mlp() for _ in range(4))

    def body(self, x):
        weights, chosen = self.gate(x).softmax(1).topk(2)
        y = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            rows, k = torch.nonzero(chosen == e, as_tuple=True)
            y.index_add_(0, rows, weights[rows, k, None] * self.experts[e](x[rows]))
        return self.part(y)


class EarlyExperts(Experts):
    """An expert without rows is not run, any other on all rows."""

    def body(self, x):
        y, chosen = torch.zeros_like(x), self.gate(x).argmax(1)
        for k, expert in enumerate(self.experts):
            if (chosen == k).any():
                y = torch.where((chosen == k)[:, None], expert(x), y)
        return self.part(y)


class Cache:
    def __init__(self):
        self.seen = []


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v, self.o = nn.Linear(4, 4), mlp(), nn.Linear(4, 4)

    def forward(self, x, cache, scale):
        v = self.v(x)
        cache.seen.append(v)
        return self.o((self.q(x) @ x.mT * scale).softmax(-1) @ v)


class GivenAnObject(Branching):
    """Values leave through it."""

    def __init__(self):
        super().__init__()
        self.part = Attention()

    def body(self, x):
        cache = Cache()
        return self.part(x, cache=cache, scale=0.5) + cache.seen[0].relu()


class Twice(Branching):
    def body(self, x):
        return self.part(self.part(x).sigmoid())


class OtherShapes(Branching):
    def body(self, x):
        return self.part(x) + self.part(x[:1])


class Flagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in "abc")
        self.straight = True

    def forward(self, x, straight=True):
        x = self.a(x).relu()
        return self.b(x) if straight and self.straight else self.c(x.sigmoid())


class OtherArguments(Branching):
    def __init__(self):
        super().__init__()
        self.part = Flagged()

    def body(self, x):
        return self.part(x) + self.part(x, straight=False)


class Tied(Branching):
    """Two parts share a weight."""

    def __init__(self):
        super().__init__()
        self.other = mlp()
        self.other[2].weight = self.part[2].weight

    def body(self, x):
        return self.other(self.part(x).sigmoid())


class WritesItsInput(Branching):
    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.ReLU(inplace=True), *mlp())

    def body(self, x):
        x = x * 2
        return self.part(x) + x


class Statistics(Branching):
    """Writes buffers and draws random numbers."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(8)
        self.part = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Dropout(), nn.Linear(8, 4))

    def body(self, x):
        return self.part(x) + random.random() * 0


SOUND = (
    Branching, Experts, EarlyExperts, GivenAnObject, Twice, OtherShapes, Tied, WritesItsInput, Statistics
)  # fmt: skip


class ReadsAWeight(Branching):
    def body(self, x):
        return self.part(x) + F.linear(x, self.part[0].weight).sum(1, keepdim=True)


class ReadsAView(Branching):
    def __init__(self):
        super().__init__()
        self.double()  # which makes the memory anew
        self.kept = [self.part[0].weight.detach().mT]

    def body(self, x):
        return self.part(x) + (x @ self.kept[0]).sum(1, keepdim=True)


class CallsForward(Branching):
    def body(self, x):
        return self.part(x) + self.part[0].forward(x).sum(1, keepdim=True)


class GivesAWeight(Branching):
    """A module is given a parameter of its own."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x, weight):
            return self.b(self.a(x).relu()) + F.linear(x, weight).sum(1, keepdim=True)

    def __init__(self):
        super().__init__()
        self.part = self.Scaled()

    def body(self, x):
        return self.part(x, self.part.a.weight)


class Keeps(nn.Module):
    """Keeps a value inside it for others."""

    def __init__(self, keep):
        super().__init__()
        self.a, self.b, self.keep = nn.Linear(4, 8), nn.Linear(8, 4), keep

    def forward(self, x):
        h = self.a(x).relu()
        self.keep(self, h)
        return self.b(h)


class KeepsAnAttribute(Branching):
    def __init__(self):
        super().__init__()
        self.part = Keeps(lambda module, h: setattr(module, "h", h))

    def body(self, x):
        return self.part(x) + self.part.h.sum(1, keepdim=True)


class KeepsInMemory(Branching):
    """Written in place to a tensor that is there before."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(6, 8, dtype=torch.float64)
        self.part = Keeps(lambda _, h: self.kept.copy_(h))

    def body(self, x):
        return self.part(x) + self.kept.sum(1, keepdim=True)


class KeepsByAHook(Branching):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.part[1].register_forward_hook(lambda module, args, result: self.seen.append(result))

    def body(self, x):
        self.seen.clear()
        return self.part(x) + self.seen[0].sum(1, keepdim=True)


class SetsAnAttribute(Branching):
    """What a module does depends on what its parent has set."""

    def __init__(self):
        super().__init__()
        self.part = Flagged()

    def body(self, x):
        self.part.straight = False
        y = self.part(x)
        self.part.straight = True
        return y


class SetsATensor(Branching):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), None

        def forward(self, x):
            x = self.a(x).relu()
            return self.b(x if self.gate is None else x * self.gate.relu())

    def __init__(self):
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), self.Gated()

    def body(self, x):
        self.part.gate = self.first(x)
        y = self.part(x)
        self.part.gate = None
        return y


class OtherNumbers(Branching):
    """The same operators, with other numbers."""

    class Power(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.power = nn.Linear(4, 8), nn.Linear(8, 4), 2

        def forward(self, x):
            return self.b(self.a(x).relu() ** self.power)

    def __init__(self):
        super().__init__()
        self.part = self.Power()

    def body(self, x):
        self.part.power = 2
        y = self.part(x)
        self.part.power = 3
        return y + self.part(x)


class Returns(Branching):
    """A parameter is part of what it returns."""

    def forward(self, x):
        return super().forward(x), self.part[0].bias


class OtherInTraining(Branching):
    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 8), self.Bounded(), nn.Linear(8, 4))

    class Bounded(nn.ReLU):
        def forward(self, x):
            return x.tanh() if self.training else x.relu()


BETRAYING = (
    ReadsAWeight, ReadsAView, CallsForward, GivesAWeight, KeepsAnAttribute, KeepsInMemory, KeepsByAHook,
    SetsAnAttribute, SetsATensor, OtherArguments, OtherNumbers,
)  # fmt: skip


def make(kind):
    torch.manual_seed(0)
    return kind().double(), torch.randn(6, 4, dtype=torch.float64)


def run(model, x):
    with torch.no_grad():
        model.eval()
        y = model(x)
        model.train()
        return y


def change(model, graph, x):
    """The largest change of the function by rescalings, and whether any weight was changed."""
    expected, before = run(model, x), copy.deepcopy(model.state_dict())
    error = 0.0
    for step in (pathsgd.unbalance, pathsgd.balance):
        step(model, graph)
        error = max(error, (run(model, x) - expected).abs().max().item())
    return error, not all(map(torch.equal, before.values(), model.state_dict().values()))


@pytest.mark.parametrize("kind", SOUND, ids=lambda kind: kind.__name__)
def test_units_inside_the_parts_are_rescaled(kind):
    model, x = make(kind)
    graph = pathsgd.trace(model, x)
    error, changed = change(model, graph, x)
    assert error < 1e-10
    assert changed
    assert "it could not be traced as a whole" in str(graph)


@pytest.mark.parametrize("kind", BETRAYING, ids=lambda kind: kind.__name__)
def test_what_shows_outside_is_not_rescaled(kind):
    model, x = make(kind)
    try:
        graph = pathsgd.trace(model, x)
    except pathsgd.TraceError:
        return  # there is no part
    if not len(unit_classes_of(graph).free):
        return  # there is no unit
    error, _ = change(model, graph, x)
    assert error < 1e-10


def test_what_is_returned_and_what_is_done_in_training_is_not_rescaled():
    model, x = make(Returns)
    graph = pathsgd.trace(model, x)
    assert graph.parameters["part.0.bias"].status is ParameterStatus.OUTSIDE
    assert not len(unit_classes_of(graph).free)
    model, x = make(OtherInTraining)
    with pytest.raises(pathsgd.DataDependentError):
        pathsgd.trace(model, x)


@pytest.mark.parametrize("kind", [ReadsAWeight, ReadsAView, CallsForward])
def test_a_parameter_that_is_read_outside_keeps_its_value(kind):
    model, x = make(kind)
    info = pathsgd.trace(model, x).parameters["part.0.weight"]
    assert info.status is ParameterStatus.OUTSIDE
    assert "around the part" in info.reason


def test_all_experts_that_were_run():
    model, x = make(Experts)
    graph = pathsgd.trace(model, x)
    assert all(graph.parameters[f"experts.{k}.{j}.weight"].normalised for k in range(4) for j in (0, 2))
    assert graph.parameters["gate.weight"].status is ParameterStatus.OUTSIDE
    one = pathsgd.trace(model, x[:1])
    run_of_one = sum(one.parameters[f"experts.{k}.0.weight"].normalised for k in range(4))
    assert run_of_one == 2
    assert "not run with this example" in str(one)


@pytest.mark.parametrize("kind", [Statistics, Experts, KeepsInMemory], ids=lambda kind: kind.__name__)
def test_the_model_is_as_before(kind):
    model, x = make(kind)
    before = {
        name: (tensor, tensor.clone(), tensor._version, tensor.data_ptr())
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    attributes = {module: list(vars(module).items()) for module in model.modules()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    numbers, states = torch.get_rng_state(), random.getstate()
    try:
        pathsgd.trace(model, x)
    except pathsgd.TraceError:
        assert kind is KeepsInMemory
    assert torch.equal(torch.get_rng_state(), numbers)
    assert random.getstate() == states
    for name, (tensor, value, version, address) in before.items():
        found = model.state_dict(keep_vars=True)[name]
        assert found is tensor
        assert torch.equal(found, value)
        assert (found._version, found.data_ptr()) == (version, address)
    for module, items in attributes.items():
        assert list(vars(module)) == [name for name, _ in items]
        assert all(vars(module)[name] is value for name, value in items)
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert all(module.training for module in model.modules())


def test_a_module_that_copies_its_part():
    class Copies(Branching):
        def body(self, x):
            return copy.deepcopy(self.part)(x) + self.part(x)

    recorder = Recorder(Branching())
    assert copy.deepcopy(recorder) is recorder
    model, x = make(Copies)
    assert not len(unit_classes_of(pathsgd.trace(model, x)).free)


def test_what_cannot_be_run_is_an_error_as_before():
    model, x = make(Branching)
    with pytest.raises(pathsgd.DataDependentError, match="depend on values"):
        pathsgd.trace(copy.deepcopy(model).to("meta"), x)
    with pytest.raises(pathsgd.TraceError, match="check that example_input"):
        pathsgd.trace(model, x[:, :3])


def test_balanced_muon_takes_the_same_steps_from_a_rescaled_start():
    model, x = make(Experts)
    graph = pathsgd.trace(model, x)
    rescaled = copy.deepcopy(model)
    pathsgd.unbalance(rescaled, graph, powers_of_two=True)
    assert not torch.equal(model.experts[0][0].weight, rescaled.experts[0][0].weight)
    for net in (model, rescaled):
        optimizer = pathsgd.BalancedMuon(net, graph)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(run(model, x), run(rescaled, x), rtol=1e-9, atol=1e-9)
