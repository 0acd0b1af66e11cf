"""A model's tensors, read from where modules keep them: when that is noticed to be another place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pathsgd import PathError, PathGraph, PathSGD
from pathsgd.training.staleness import ModelTensors
from support.networks import SmallResNet, build, traced

pytestmark = pytest.mark.filterwarnings("ignore:.*share a path with the matrix:UserWarning")
"""Paths of a step end at batch norms, so of a ResNet's few are left, and a warning says so."""


def make():
    model, _ = build(SmallResNet, torch.float32)
    graph = traced(SmallResNet, torch.float32)
    return model, graph, ModelTensors(model)


def assert_current(tensors, model, graph):
    found, expected = tensors.read(graph), graph.tensors(model)
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in expected)


def test_one_walk_serves_until_something_moves(monkeypatch):
    model, graph, tensors = make()
    assert_current(tensors, model, graph)
    monkeypatch.setattr(PathGraph, "tensors", None)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    tensors.read(graph)


def replace_buffer(model):
    module = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    module.running_mean = torch.ones_like(module.running_mean)


def move_parameter(model):
    parameter = next(model.parameters())
    parameter.data = parameter.data.clone()


def replace_parameter(model):
    module = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    module.weight = nn.Parameter(module.weight.detach().clone())


def replace_module(model):
    name, module = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d))
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, nn.BatchNorm2d(module.num_features))


@pytest.mark.parametrize("change", [replace_buffer, move_parameter])
def test_what_moves_is_looked_for_again(change):
    model, graph, tensors = make()
    tensors.read(graph)
    change(model)
    assert_current(tensors, model, graph)


def add_parameter(model):
    model.extra = nn.Parameter(torch.ones(1))


def add_module(model):
    model.extra = nn.Linear(1, 1)


@pytest.mark.parametrize("change", [add_parameter, add_module, replace_parameter, replace_module])
def test_what_was_not_traced_is_an_error(change):
    model, graph, tensors = make()
    tensors.read(graph)
    change(model)
    with pytest.raises(PathError):
        tensors.read(graph)


@pytest.mark.parametrize("change", [replace_parameter, replace_module, add_parameter, add_module])
def test_an_optimizer_notices_other_parameters(change):
    model, x = build(SmallResNet, torch.float32)
    optimizer = PathSGD(model, traced(SmallResNet, torch.float32), lr=1e-6)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    change(model)
    model(x).sum().backward()
    with pytest.raises(PathError):
        optimizer.step()
