"""Checkpoints of sharded models (torch.distributed.checkpoint): of two ranks, they load on any number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from support.ranks import run_on_ranks
from support.sharded import OPTIMIZERS, Mlp, make, step_on, traced, whole_parameters

NAMES = ("PathMuon", "PathAdam", "PathSGD", "PathNormalized")
SAVED_AFTER, UNTIL = 2, 4
SEEN_BY_ALL = range(2)
"""The batches of every rank: gradients are then the same on any number of ranks."""


def prepare():
    traced(Mlp)


def begin(name, shard=fully_shard):
    model = shard(make(Mlp))
    return model, OPTIMIZERS[name](model, traced(Mlp))


def go_on(model, optimizer, steps):
    for step in steps:
        step_on(model, optimizer, Mlp, step, SEEN_BY_ALL)
    return whole_parameters(model)


def states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def train_and_save(folder):
    """Asynchronously: training goes on while it is written. The weights at the end."""
    ends, group = {}, dist.new_group()  # of its own: calls of two threads must not meet in one
    for name in NAMES:
        model, optimizer = begin(name)
        go_on(model, optimizer, range(SAVED_AFTER))
        path = Path(folder, name)
        saving = dcp.async_save(states(model, optimizer), checkpoint_id=path, process_group=group)
        ends[name] = go_on(model, optimizer, range(SAVED_AFTER, UNTIL))
        saving.result()
    return ends


def load_and_train(folder, shard=fully_shard):
    ends = {}
    for name in NAMES:
        model, optimizer = begin(name, shard)
        before = whole_parameters(model)
        state = states(model, optimizer)  # takes a step without gradients, to see what state there is
        assert all(map(torch.equal, before, whole_parameters(model))), name
        dcp.load(state, checkpoint_id=Path(folder, name))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        ends[name] = go_on(model, optimizer, range(SAVED_AFTER, UNTIL))
    return ends


def stand_still(name):
    """Whether steps at a rate of 0 with gradients of 0 change nothing, after some others."""
    model, optimizer = begin(name)
    before = go_on(model, optimizer, range(2))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2):
        optimizer.step()
    return all(map(torch.equal, before, whole_parameters(model)))


def save_and_load(folder):
    return train_and_save(folder), load_and_train(folder)


def stand_still_with_all():
    return list(map(stand_still, NAMES))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_two_ranks_load_on_one_two_and_four(tmp_path):
    """On two they go on to the last bit; whole parameters are one rank's."""
    ranks = run_on_ranks(save_and_load, 2, str(tmp_path))
    on_others = load_and_train(tmp_path, lambda model: model), *run_on_ranks(load_and_train, 4, str(tmp_path))
    for name, end in ranks[0][0].items():
        for ends, resumed in ranks:
            assert all(map(torch.equal, ends[name], end)), name
            assert all(map(torch.equal, resumed[name], end)), name
        for found in on_others:
            for a, b in zip(found[name], end, strict=True):
                assert (a - b).abs().max() <= 1e-9, name


def test_a_step_without_rate_and_gradients_changes_nothing():
    assert all(map(all, run_on_ranks(stand_still_with_all, 2)))
