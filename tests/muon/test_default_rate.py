"""Without a rate and without a schedule the rate falls; with either it is the user's."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

from pathsgd import BalancedMuon
from pathsgd.muon import default_rate

DEFAULT = BalancedMuon.default_lr


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """The rate falls after 10 steps."""
    monkeypatch.setattr(default_rate, "HOLD", 10)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def train(model, optimizer, steps, scheduler=None):
    """The rates of these steps."""
    rates = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4, generator=generator)).square().sum().backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates


def falling(first, last):
    return [DEFAULT / math.sqrt(1 + max(0, k - 10) / 5) for k in range(first, last)]


def test_it_falls_with_the_steps():
    model = network()
    assert train(model, BalancedMuon(model), 40) == falling(0, 40)
    assert falling(39, 40)[0] < DEFAULT / 2


def test_a_rate_that_was_given_stays():
    model = network()
    assert train(model, BalancedMuon(model, lr=DEFAULT), 5) == 5 * [DEFAULT]


def test_the_usual_rate_of_others_is_noticed():
    with pytest.warns(UserWarning, match="angle"):
        BalancedMuon(network(), lr=1e-3)


def test_a_tensor_stays():
    model = network()
    optimizer = BalancedMuon(model, lr=torch.tensor(0.02))
    train(model, optimizer, 3)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.02)


def test_a_scheduler_starts_from_the_default():
    model = network()
    optimizer = BalancedMuon(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / 10)
    result = train(model, optimizer, 5, scheduler)
    assert result == pytest.approx([DEFAULT * (1 - k / 10) for k in range(5)])


def test_a_rate_that_is_set_by_hand_stays():
    model = network()
    optimizer = BalancedMuon(model)
    train(model, optimizer, 4)
    optimizer.param_groups[0]["lr"] = 0.01
    assert train(model, optimizer, 4) == 4 * [0.01]


def test_a_step_at_rate_zero_does_not_count():
    """Checkpoints of torch.distributed take one before they load."""
    model = network()
    optimizer = BalancedMuon(model)
    train(model, optimizer, 14)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = rate
    assert train(model, optimizer, 3) == falling(14, 17)


def test_a_group_that_is_added_begins_anew():
    model, other = network(), nn.Linear(2, 2)
    optimizer = BalancedMuon(model)
    train(model, optimizer, 4)
    optimizer.add_param_group({"params": list(other.parameters())})
    assert train(model, optimizer, 10) == falling(4, 14)
    assert [group["lr"] for group in optimizer.param_groups] == [falling(14, 15)[0], DEFAULT]


def copies(model, optimizer):
    return copy.deepcopy((model, optimizer))


def pickled(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


def loaded(model, optimizer):
    again = network()
    again.load_state_dict(model.state_dict())
    fresh = type(optimizer)(again)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares tensors
    return again, fresh


@pytest.mark.parametrize("resume", [copies, pickled, loaded])
@pytest.mark.parametrize("after", [7, 15])
def test_resumed_it_goes_on(resume, after):
    model = network()
    optimizer = BalancedMuon(model)
    train(model, optimizer, after)
    again = resume(model, optimizer)
    expected, result = train(model, optimizer, 7), train(*again, 7)
    assert result == expected == falling(after, after + 7)
    for one, other in zip(model.parameters(), again[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_was_saved_under_a_schedule_is_not_lowered():
    model = network()
    optimizer = BalancedMuon(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    train(model, optimizer, 3)
    again, fresh = loaded(model, optimizer)
    assert train(again, fresh, 3) == 3 * [DEFAULT]


def test_a_capture_warns_that_the_rate_stays(monkeypatch):
    model = network()
    optimizer = BalancedMuon(model)
    train(model, optimizer, 1)
    monkeypatch.setattr(default_rate, "is_capturing", lambda: True)
    with pytest.warns(UserWarning, match="replays do not lower it") as warned:
        train(model, optimizer, 1)
    assert warned[0].filename == __file__
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 1)
