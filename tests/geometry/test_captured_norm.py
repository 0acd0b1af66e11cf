"""When a norm is captured, and when it is measured eagerly again, with a stand-in for CUDA graphs."""

from __future__ import annotations

import copy
import gc
import math
import pickle

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd.geometry import captured_norm
from pathsgd.geometry.captured_norm import MOST_KINDS, WARM_UP, CapturedNorm
from pathsgd.geometry.passes import powered_network
from pathsgd.geometry.range_check import RangeCheck, measure_in_range


class Graph:
    """Measures again, into the same tensors, what a CUDA graph would replay."""

    replays = 0

    def __init__(self, network, measure):
        self.traced, self.p, self.measure = network.traced, network.arithmetic.p, measure
        self.tensors = network.edges.tensors
        found, check = self.run()
        self.captured = CapturedNorm(self, found, check.extremes(), check.looked)

    def run(self):
        check = RangeCheck(powered_network(self.traced, self.tensors, self.p))
        return self.measure(check.network, check), check

    def replay(self):
        Graph.replays += 1
        found, check = self.run()
        for old, new in zip(self.captured.found, found, strict=True):
            old.copy_(new)
        self.captured.extremes.copy_(check.extremes())


@pytest.fixture
def captures(monkeypatch):
    """The captures that were made, by what they share memory with."""
    made = []

    def capture(network, measure, beside):
        made.append(beside)
        return Graph(network, measure).captured

    monkeypatch.setattr(captured_norm, "_is_capturable", lambda tensors: True)
    monkeypatch.setattr(captured_norm, "capture", capture)
    monkeypatch.setattr(Graph, "replays", 0)
    with torch.no_grad():
        yield made


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, pathsgd.trace(model)


def measure(model, graph, count=1, **options):
    """The norm, which is that of an eager call in all bits."""
    for _ in range(count):
        found = pathsgd.path_norm(model, graph, **options)
        with captured_norm._lock:
            expected = pathsgd.path_norm(model, graph, **options)
        for a, b in zip(*([x] if torch.is_tensor(x) else x for x in (found, expected)), strict=True):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype
    return found


def test_captured_once_and_replayed_with_the_weights_of_now(captures):
    model, graph = build()
    measure(model, graph, WARM_UP)
    assert (len(captures), Graph.replays) == (1, 0)
    found = [measure(model, graph)]
    for _ in range(3):
        model[2].weight.mul_(2)
        found.append(measure(model, graph))
    assert (len(captures), Graph.replays) == (1, 4)
    assert found == sorted(found)
    assert len(set(map(float, found))) == 4, "a result was overwritten"


@pytest.mark.parametrize("factor", [2.0**-70, 2.0**70])
def test_exponents_where_plain_floats_are_not_enough(captures, factor, monkeypatch):
    replayed, replay = [], CapturedNorm.replay
    monkeypatch.setattr(
        CapturedNorm, "replay", lambda *arguments: replayed.append(replay(*arguments)) or replayed[-1]
    )
    model, graph = build()
    measure(model, graph, WARM_UP)
    for each in (factor, 1 / factor):
        for parameter in model[4].parameters():
            parameter.mul_(each)
        measure(model, graph)
    assert [found is None for found in replayed] == [True, False]


def test_a_dead_unit_is_looked_at_again(captures):
    model, graph = build()
    measure(model, graph, WARM_UP)
    model[2].weight[0] = model[2].bias[0] = 0
    measure(model, graph)
    assert Graph.replays == 1


def test_weights_that_keep_moving_are_captured_less_and_less(captures):
    model, graph = build()
    kept = []
    for _ in range(4 * WARM_UP):
        measure(model, graph, WARM_UP)
        kept.append(model[0].weight.data)
        model[0].weight.data = model[0].weight.data.clone()
    assert (len(captures), Graph.replays) == (1, 0)
    measure(model, graph, 2 * WARM_UP + 1)
    assert (len(captures), Graph.replays) == (2, 1)


def test_moved_weights_are_not_read_where_they_were(captures):
    model, graph = build()
    measure(model, graph, WARM_UP)
    old = model[0].weight.data
    model[0].weight.data = old.clone()
    old.fill_(torch.nan)
    assert measure(model, graph).isfinite()
    assert Graph.replays == 0


def test_kinds_of_calls_share_memory_and_are_few(captures):
    model, graph = build()
    kinds = [{}, {"p": 1}, {"log": True}, {"per_output": True}]
    for options in kinds * (WARM_UP + 1):
        measure(model, graph, **options)
    assert Graph.replays == len(captures) == len(kinds)
    assert [beside is None for beside in captures] == [True, False, False, False]
    for _ in range(WARM_UP):
        for k in range(MOST_KINDS + 1):
            measure(model, graph, p=1 + k / 16)
    assert len(captured_norm._calls[graph]) == MOST_KINDS
    assert len(captures) == len(kinds)


def test_other_kernels_are_another_kind(captures, monkeypatch):
    model, graph = build()
    measure(model, graph, WARM_UP)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    measure(model, graph)
    assert Graph.replays == 0


@pytest.mark.parametrize("factor", [1.0, 2.0**-70, 2.0**70])
def test_the_range_of_a_norm_with_gradients_is_that_of_a_replay(captures, factor, monkeypatch):
    model, graph = build()

    def differentiate():
        with torch.enable_grad():
            norm = pathsgd.path_norm(model, graph, log=True)
        return norm, torch.autograd.grad(norm, list(model.parameters()))

    eager = []

    def record(*given, exponents=None):
        eager.append((torch.is_grad_enabled(), exponents))
        return measure_in_range(*given, exponents)

    monkeypatch.setattr(captured_norm, "measure_in_range", record)
    for _ in range(WARM_UP):
        differentiate()
    assert (len(captures), Graph.replays) == (1, 0)
    # What is captured was run before: kernels cannot be compiled in a capture.
    assert eager == [(True, None)] * WARM_UP + [(False, None)]
    eager.clear()
    for parameter in model[4].parameters():
        parameter.mul_(factor)
    found = differentiate()
    assert Graph.replays == 1
    assert eager == ([(True, False)] if factor == 1 else [(True, False), (True, True)])
    with captured_norm._lock:
        expected = differentiate()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_maximum_and_large_networks_are_eager(captures, monkeypatch):
    model, graph = build()
    measure(model, graph, WARM_UP)
    measure(model, graph, 2 * WARM_UP, p=math.inf)
    # Weights and biases, units.
    monkeypatch.setattr(captured_norm, "MOST_ENTRIES", 46 + 13)
    measure(model, graph, 2 * WARM_UP, p=1)
    assert len(captures) == 1


def test_without_memory_to_capture_it_goes_on_eagerly(captures, monkeypatch):
    def capture(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(captured_norm, "capture", capture)
    measure(*build(), 3 * WARM_UP)


def test_captures_go_with_their_graph(captures):
    model, graph = build()
    measure(model, graph, WARM_UP)
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert other not in captured_norm._calls
    count = len(captured_norm._calls)
    # The stand-in refers to the graph, which a CUDA graph does not.
    captured_norm._calls[graph].clear()
    del graph, other
    gc.collect()
    assert len(captured_norm._calls) == count - 1
