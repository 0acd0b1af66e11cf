"""When a captured measurement looks at the range of its numbers, with stand-ins for CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd.geometry.gamma import measure, measure_gammas
from pathsgd.geometry.passes import powered_network
from pathsgd.geometry.range_check import CHECK_EVERY, RangeCheck
from pathsgd.optim.captured_measurement import CapturedMeasurement


class Graph:
    """Runs again what a CUDA graph would replay."""

    def __init__(self, run):
        self.run, self.replays = run, 0

    def replay(self):
        self.replays += 1
        self.run()


@pytest.fixture
def captured():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.ReLU())), nn.Linear(6, 2)
    )
    with torch.no_grad():
        model[2].weight[0] = 0  # a dead unit
        model[2].bias[0] = 0
    graph = pathsgd.trace(model)
    tensors = graph.tensors(model)
    found = CapturedMeasurement.__new__(CapturedMeasurement)
    found._usual, found._replays, found.found = None, 0, "gammas"

    @torch.no_grad()
    def check():
        network = powered_network(graph, tensors, 2.0)
        own = RangeCheck(network)
        measure(network, own)
        return own

    found.check = check()
    found.extremes = found.check.extremes()
    found.seen = torch.empty_like(found.extremes)
    found.passes = Graph(lambda: None)
    found.checked_passes = Graph(lambda: found.extremes.copy_(check().extremes()))
    return model, found


def scale(model, factor):
    with torch.no_grad():
        model[4].weight.mul_(factor)


def test_at_first_every_time_then_now_and_then(captured):
    _, found = captured
    for _ in range(2 * CHECK_EVERY):
        assert found.replay() == "gammas"
    assert found.passes.replays == 2 * CHECK_EVERY
    assert found.checked_passes.replays == CHECK_EVERY + 1


@pytest.mark.parametrize("factor", [2.0**70, 2.0**-70])
def test_numbers_that_leave_the_range_are_noticed(captured, factor):
    """One check later: it reads what was copied before, so as not to wait for the device."""
    model, found = captured
    assert found.replay() == "gammas"
    scale(model, factor)
    assert found.replay() == "gammas"
    assert found.replay() is None


def test_a_dead_unit_that_stays_is_no_reason(captured):
    """Though the bound that it is below moves with the largest number."""
    model, found = captured
    for _ in range(CHECK_EVERY):
        assert found.replay() == "gammas"
        scale(model, 2.0)


def test_without_room_every_replay_is_checked_and_waited_for(captured):
    model, found = captured
    for _ in range(CHECK_EVERY + 2):
        found.replay()
    scale(model, 2.0**38)  # near 2^80: within the range, with less than 2^32 to spare
    checked = found.checked_passes.replays
    found.checked_passes.replay()
    found.check.suspects(found.extremes.tolist())
    for k in range(3):
        assert found.replay() == "gammas"
        assert found.checked_passes.replays == checked + 2 + k
    scale(model, 2.0**30)
    assert found.replay() is None


def test_room_is_that_of_the_model_and_not_of_its_graph(captured):
    """Another model that is measured by the same graph may have plenty."""
    model, found = captured
    network = found.check.network
    another = {name: tensor.detach().clone() for name, tensor in network.edges.tensors.items()}
    scale(model, 2.0**38)
    for _ in range(CHECK_EVERY + 2):
        found.replay()
    measure_gammas(network.traced, another)
    checked = found.checked_passes.replays
    found.replay()
    assert found.checked_passes.replays == checked + 1
