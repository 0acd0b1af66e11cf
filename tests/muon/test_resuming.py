"""Steps that are skipped, accumulated or taken at rate 0; checkpoints; weights that others have written."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import BalancedMuon, PathError
from pathsgd.muon import upkeep
from support.unbalanced import TARGETS, Lazy, build, distance, make, same, same_state, train, weights

# Steps that are skipped, accumulated or taken at rate 0


def test_a_step_that_grad_scaler_skips_changes_nothing():
    model, x = build(torch.float32)
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    train(model, optimizer, x, 9)  # upkeep is due at the next step
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    for is_finite in (False, True):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), TARGETS)).backward()
        if not is_finite:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert same(model, before) != is_finite
        assert same_state(optimizer.state_dict(), state) != is_finite


def test_a_step_at_rate_0_changes_no_weight_and_does_no_upkeep():
    model, x = build(torch.float32)
    optimizer = make(model, lr=0.0)
    before = weights(model)
    train(model, optimizer, x, 12)
    assert same(model, before)
    assert optimizer.param_groups[0][upkeep.STEPS] == 0


def test_without_gradients_nothing_happens():
    """But that the default rate counts steps."""
    model, x = build(torch.float32)
    optimizer = make(model)
    train(model, optimizer, x, 2)
    optimizer.zero_grad()
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    for _ in range(12):
        optimizer.step()
    assert same(model, before)
    assert same_state({**optimizer.state_dict(), "param_groups": state["param_groups"]}, state)


def test_gradients_that_are_zeroed_in_place_give_the_same_steps():
    model, x = build(torch.float32)
    other = copy.deepcopy(model)
    optimizers = make(model), make(other)
    for _ in range(12):
        for m, optimizer, to_none in zip((model, other), optimizers, (True, False), strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            F.cross_entropy(m(x), TARGETS).backward()
            optimizer.step()
    assert same(model, other)


def test_gradients_from_before_a_lazy_start_are_rescaled_with_the_weights():
    """Without an example the model is traced and balanced at the first step, when there are gradients of the
    weights as they were: also several, accumulated. It is the same training as from an example."""
    torch.manual_seed(0)
    model, x = Lazy().double(), build()[1]
    pathsgd.unbalance(model, x[:1])
    other = copy.deepcopy(model)
    start = weights(model)
    optimizers = BalancedMuon(model), BalancedMuon(other, x[:1])
    assert same(model, start)
    assert not same(other, start)
    for m, optimizer in zip((model, other), optimizers, strict=True):
        for k in range(3):
            F.cross_entropy(m(x * (1 + k)), TARGETS).backward()
        optimizer.step()
        train(m, optimizer, x, 11)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert distance(p, q) < 1e-13


def test_a_closure_is_called_once_and_its_loss_returned():
    model, x = build()
    other = copy.deepcopy(model)
    optimizer, calls = make(model), []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), TARGETS)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(12)]
    assert losses == train(other, make(other), x, 12)
    assert len(calls) == 12
    assert same(model, other)


# Checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", ["weights first", "optimizer first", "state first"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_resumed_training_is_the_uninterrupted_one_to_the_bit(order, lazy, dtype):
    """With upkeep on both sides of it, whether the new optimizer is made before the weights are loaded, or
    after: these are balanced already, and are not balanced again."""

    torch.manual_seed(0)
    x = build(dtype)[1]
    model = Lazy().to(dtype) if lazy else build(dtype)[0]
    optimizer = BalancedMuon(model) if lazy else make(model)
    train(model, optimizer, x, 12)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, x, 12)
    file.seek(0)
    saved, state = torch.load(file)
    other = Lazy().to(dtype) if lazy else build(dtype, seed=5)[0]
    if order == "weights first":
        other.load_state_dict(saved)
    resumed = BalancedMuon(other) if lazy else make(other)
    if order == "optimizer first":
        other.load_state_dict(saved)
    resumed.load_state_dict(state)
    if order == "state first":
        other.load_state_dict(saved)
    train(other, resumed, x, 12)
    assert same(model, other)
    assert same_state(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_of_model_and_optimizer_together_go_on_alike(copied):
    model, x = build(torch.float32)
    optimizer = make(model)
    train(model, optimizer, x, 12)
    other, its_optimizer = copied((model, optimizer))
    assert its_optimizer.param_groups[0]["params"][0] is other[0].weight
    train(model, optimizer, x, 12)
    train(other, its_optimizer, x, 12)
    assert same(model, other)
    other[2].weight = nn.Parameter(other[2].weight.detach().clone())
    with pytest.raises(PathError, match="other parameters or modules"):
        train(other, its_optimizer, x)


def test_foreign_weights_in_mid_training_are_balanced_as_they_are():
    """They are no rescaling of what was there: their function stays, and training goes on from it."""
    model, x = build()
    optimizer = make(model)
    train(model, optimizer, x, 12)
    foreign, _ = build(seed=9)
    model.load_state_dict(foreign.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, x)
    assert distance(model(x), foreign(x)) < 1e-14
    expected, _ = build(seed=9)
    pathsgd.balance(expected)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert distance(p, q) < 1e-12
    optimizer.param_groups[0]["lr"] = 0.05
    losses = train(model, optimizer, x, 20)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_earlier_checkpoint_is_not_mistaken_for_a_rescaling(dtype):
    """It is close to the weights, so that in 16 bits it could be one, but for rounding."""
    model, x = build(dtype)
    optimizer = make(model, lr=0.01)
    train(model, optimizer, x, 3)
    saved = copy.deepcopy(model.state_dict())
    expected = model(x).detach()
    train(model, optimizer, x, 2)
    model.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, x)
    assert distance(model(x), expected) <= (0 if dtype == torch.bfloat16 else 1e-6)


def test_weights_that_turned_nan_are_named_once_they_are_written():
    model, x = build()
    optimizer = make(model)
    train(model, optimizer, x, 2)
    model[2].weight.data.fill_(torch.nan)
    optimizer.refresh()
    with pytest.raises(PathError, match=r"'2.weight' holds nan or inf"):
        train(model, optimizer, x)
    with pytest.raises(PathError, match=r"'2.weight' holds nan or inf"):
        make(model)


def test_writes_that_torch_does_not_count_need_a_refresh():
    """Through .data: undone only after refresh()."""
    factor = torch.tensor([8.0] * 12, dtype=torch.float64)
    ends = []
    for is_rescaled, is_told in ((False, False), (True, True), (True, False)):
        model, x = build()
        optimizer = make(model)
        train(model, optimizer, x, 2)
        if is_rescaled:
            model[0].weight.data *= factor[:, None]
            model[0].bias.data *= factor
            model[2].weight.data /= factor
        if is_told:
            optimizer.refresh()
        train(model, optimizer, x, 2)
        ends.append(weights(model))
    assert all(map(torch.equal, ends[0], ends[1]))
    assert not any(map(torch.equal, ends[0][:3], ends[2][:3]))
