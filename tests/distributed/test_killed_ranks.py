"""A rank is killed (kill -9), and all are started again from the last checkpoint: they end at the same
weights, to the last bit. Real processes, really killed, while they step, save or wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from support.ranks import run_on_ranks
from support.sharded import OPTIMIZERS, Convolutional, loss_of, make, traced, whole_parameters

STEPS, SAVE_EVERY, KILLED_AFTER = 9, 3, (3, 6)


def prepare():
    traced(Convolutional)


def train_with_checkpoints(folder, way, name):
    """From the last complete checkpoint in the folder on, if there is one."""
    model, rank = make(Convolutional, torch.float32), dist.get_rank()
    wrapped = DistributedDataParallel(model) if way == "DDP" else fully_shard(model)
    optimizer = OPTIMIZERS[name](wrapped, traced(Convolutional))
    saved = sorted(int(path.name) for path in Path(folder).glob("[0-9]*") if path.name.isdigit())
    first = saved[-1] if saved else 0
    if saved:
        state = states(model, optimizer)
        dcp.load(state, checkpoint_id=Path(folder, str(first)))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(first, STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, Convolutional, step, rank, torch.float32).backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            save(states(model, optimizer), Path(folder, str(step + 1)))
    return first, whole_parameters(model)


def states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save(state, path):
    """Under its name once it is complete. Statistics of batch norms are rank 0's, as they are in steps: DCP
    takes those of whichever rank has least to write, unless told."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(state, checkpoint_id=path.with_suffix(".part"), planner=planner)
    if dist.get_rank() == 0:
        os.replace(path.with_suffix(".part"), path)
    dist.barrier()


CASES = [("DDP", "PathSGD"), ("FSDP2", "PathMuon"), ("FSDP2", "PathSGD")]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_ranks_that_were_killed_end_at_the_same_weights(way, name, tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    expected = run_on_ranks(train_with_checkpoints, 2, str(undisturbed), way, name)
    kill_at = [killed / str(step) for step in KILLED_AFTER]
    found = run_on_ranks(train_with_checkpoints, 2, str(killed), way, name, kill_at=kill_at)
    for (first, weights), (_, end) in zip(found, expected, strict=True):
        assert KILLED_AFTER[-1] <= first < STEPS
        assert all(map(torch.equal, weights, end))
