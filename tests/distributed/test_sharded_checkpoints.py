"""Checkpoints (torch.distributed.checkpoint): of two ranks, they load on any number. Ranks that are killed
(kill -9) and started again from the last one end at the same weights, to the last bit: real processes, really
killed, while they step, save or wait."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pathsgd.muon.round import EVERY
from support.ranks import run_on_ranks
from support.sharded import (
    OPTIMIZERS,
    Convolutional,
    Mlp,
    are_equal,
    loss_of,
    make,
    make_rescaled,
    step_on,
    traced,
    whole_parameters,
)

NAMES = ("BalancedMuon", "PathSGD", "AdamW on paths", "Adagrad on paths")
SAVED_AFTER, UNTIL = EVERY - 3, EVERY + 2
SEEN_BY_ALL = range(2)
"""The batches of every rank: gradients are then the same on any number of ranks."""


def prepare():
    for kind in (Mlp, Convolutional):
        traced(kind)


def be_whole(model):
    return model


def begin(name, spread=fully_shard, exponent=0):
    model = spread(make_rescaled(Mlp, exponent))
    return model, OPTIMIZERS[name](model, traced(Mlp))


def go_on(model, optimizer, steps=range(SAVED_AFTER, UNTIL)):
    for step in steps:
        step_on(model, optimizer, Mlp, step, SEEN_BY_ALL)
    return whole_parameters(model)


def states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def load(path, model, optimizer):
    state = states(model, optimizer)  # takes a step without gradients, to see what state there is
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


# On another number of ranks


def train_and_save(folder):
    """Saves asynchronously: training goes on while it is written. Returns the weights at the end."""
    ends, group = {}, dist.new_group()  # of its own: calls of two threads must not meet in one
    for name in NAMES:
        model, optimizer = begin(name, exponent=9)
        go_on(model, optimizer, range(SAVED_AFTER))
        path = Path(folder, name)
        saving = dcp.async_save(states(model, optimizer), checkpoint_id=path, process_group=group)
        ends[name] = go_on(model, optimizer)
        saving.result()
    return ends


def load_and_train(folder, spread=fully_shard, names=NAMES):
    """Goes on from a checkpoint, in a model that had other weights."""
    ends = {}
    for name in names:
        model, optimizer = begin(name, spread)
        before = whole_parameters(model)
        states(model, optimizer)
        assert are_equal(before, whole_parameters(model)), name
        load(Path(folder, name), model, optimizer)
        ends[name] = go_on(model, optimizer)
    return ends


def save_and_load(folder):
    return train_and_save(folder), load_and_train(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_two_ranks_load_on_one_two_and_four(tmp_path):
    """Training goes on to the last bit on two; whole parameters are one rank's."""
    ranks = run_on_ranks(save_and_load, 2, str(tmp_path))
    on_others = load_and_train(tmp_path, be_whole), *run_on_ranks(load_and_train, 4, str(tmp_path))
    for name, end in ranks[0][0].items():
        for ends, resumed in ranks:
            assert are_equal(ends[name], end), name
            assert are_equal(resumed[name], end), name
        for resumed in on_others:
            for a, b in zip(resumed[name], end, strict=True):
                assert (a - b).abs().max() <= 1e-9, name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_one_process_loads_on_two(tmp_path):
    ends = {}
    for name in NAMES:
        model, optimizer = begin(name, be_whole, 9)
        go_on(model, optimizer, range(SAVED_AFTER))
        dcp.save(states(model, optimizer), checkpoint_id=tmp_path / name)
        ends[name] = go_on(model, optimizer)
        assert are_equal(load_and_train(tmp_path, be_whole, [name])[name], ends[name]), name
    for resumed in run_on_ranks(load_and_train, 2, str(tmp_path)):
        for name, end in ends.items():
            for a, b in zip(resumed[name], end, strict=True):
                assert (a - b).abs().max() <= 1e-9, name


# On the same ranks


def resume_in_any_order(spread):
    """Whether BalancedMuon goes on to the last bit, by the order in which all is made and loaded."""
    model, optimizer = begin("BalancedMuon", spread, 9)
    go_on(model, optimizer, range(SAVED_AFTER))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    end, same = go_on(model, optimizer), {}
    for order in (
        ("weights", "optimizer", "state"), ("optimizer", "weights", "state"),
        ("optimizer", "state", "weights"),
    ):  # fmt: skip
        model = spread(make(Mlp))
        for what in order:
            if what == "weights":
                model.load_state_dict(weights)
            elif what == "optimizer":
                optimizer = OPTIMIZERS["BalancedMuon"](model, traced(Mlp))
            else:
                optimizer.load_state_dict(copy.deepcopy(state))
        same[order] = are_equal(go_on(model, optimizer), end)
    return same


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
    return are_equal(before, whole_parameters(model))


def resume():
    return [resume_in_any_order(spread) for spread in (fully_shard, be_whole)], list(map(stand_still, NAMES))


def test_weights_and_state_load_in_any_order_and_a_step_without_rate_and_gradients_changes_nothing():
    for resumed, still in run_on_ranks(resume, 2):
        assert all(all(same.values()) for same in resumed), resumed
        assert all(still), still


# Killed ranks

STEPS, SAVE_EVERY, KILLED_AFTER = 9, 3, (3, 6)


def train_with_checkpoints(folder, way, name):
    """Trains from the last complete checkpoint in the folder on, if there is one."""
    model, rank = make(Convolutional, torch.float32), dist.get_rank()
    wrapped = DistributedDataParallel(model) if way == "DDP" else fully_shard(model)
    optimizer = OPTIMIZERS[name](wrapped, traced(Convolutional))
    saved = sorted(int(path.name) for path in Path(folder).glob("[0-9]*") if path.name.isdigit())
    first = saved[-1] if saved else 0
    if saved:
        load(Path(folder, str(first)), model, optimizer)
    for step in range(first, STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, Convolutional, step, rank, torch.float32).backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            save(states(model, optimizer), Path(folder, str(step + 1)))
    return first, whole_parameters(model)


def save(state, path):
    """Writes a checkpoint, under its name once it is complete."""
    dcp.save(state, checkpoint_id=path.with_suffix(".part"))
    if dist.get_rank() == 0:
        os.replace(path.with_suffix(".part"), path)
    dist.barrier()


@pytest.mark.parametrize(
    ("way", "name"),
    [("DDP", "PathSGD"), ("DDP", "BalancedMuon"), ("FSDP2", "PathSGD"), ("FSDP2", "BalancedMuon")],
)
def test_ranks_that_were_killed_end_at_the_same_weights(way, name, tmp_path):
    """Statistics of batch norms, which are of whichever rank has least to write, do not enter steps."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    expected = run_on_ranks(train_with_checkpoints, 2, str(undisturbed), way, name)
    kill_at = [killed / str(step) for step in KILLED_AFTER]
    resumed = run_on_ranks(train_with_checkpoints, 2, str(killed), way, name, kill_at=kill_at)
    for (first, weights), (_, end) in zip(resumed, expected, strict=True):
        assert KILLED_AFTER[-1] <= first < STEPS
        assert are_equal(weights, end)
