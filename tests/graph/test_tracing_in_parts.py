"""A model that cannot be traced as a whole: the modules that can be are, and nothing that is rescaled there
shows outside of them."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import pathsgd
from pathsgd.graph.recording import Recorder
from pathsgd.graph.structure import ParameterStatus
from pathsgd.graph.unit_classes import unit_classes_of
from support.in_parts import (
    BETRAYING,
    SOUND,
    Branching,
    CallsForward,
    Experts,
    KeepsInMemory,
    OtherInTraining,
    ReadsAView,
    ReadsAWeight,
    Returns,
    Statistics,
)


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
    error, changed = 0.0, False
    for step in (pathsgd.unbalance, pathsgd.balance):
        step(model, graph)
        error = max(error, (run(model, x) - expected).abs().max().item())
        changed |= not all(map(torch.equal, before.values(), model.state_dict().values()))
    return error, changed


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
