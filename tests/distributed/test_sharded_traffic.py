"""The numbers that ranks send in a step of a sharded model: vectors as wide as a layer, a few for each block,
and Muon's matrices."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import pathsgd
from pathsgd import BalancedMuon, PathNormalized, PathSGD
from pathsgd._torch import ALL_GATHER
from pathsgd.muon.round import EVERY
from support.collectives import counted_numbers
from support.ranks import run_on_ranks

OPTIMIZERS = {
    "BalancedMuon": BalancedMuon,
    "PathSGD": PathSGD,
    "PathNormalized": lambda m, x: PathNormalized(torch.optim.AdamW, m, x),
}


def make_stack():
    return nn.Sequential(nn.Linear(50, 80), nn.ReLU(), nn.Linear(80, 70), nn.ReLU(), nn.Linear(70, 5))


def make_convolutions():
    convolutions = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 5))


def count_numbers():
    """Counts the numbers that a rank sends in each of ``EVERY`` steps, by optimizer and kind of call."""
    by_name = {}
    cases = [(name, make_stack, torch.ones(1, 50)) for name in OPTIMIZERS]
    for name, make, x in [*cases, ("convolutions", make_convolutions, torch.ones(1, 3, 5, 5))]:
        model = fully_shard(make())
        optimizer = OPTIMIZERS.get(name, PathSGD)(model, x)
        model(x).sum().backward()
        by_name[name] = []
        for step in range(EVERY):
            with counted_numbers() as sent, CommDebugMode() as calls:
                if step == 1 and name != "BalancedMuon":
                    pathsgd.clip_path_grad_norm_(optimizer, 1.0)
                optimizer.step()
            assert sum(map(len, sent.values())) == calls.get_total_counts()  # DTensor sends nothing by itself
            by_name[name].append(sent)
    return by_name


def test_what_is_sent():
    ranks = run_on_ranks(count_numbers, 2)
    check_muon(ranks)
    check_paths(ranks)


def check_muon(ranks):
    matrices, blocks, ends = 80 * 50 + 70 * 80, 6, 50 + 2 * (80 + 70) + 5 + 2 * (80 + 70 + 5)
    for by_name in ranks:
        for step, sent in enumerate(by_name["BalancedMuon"]):
            assert not sent["broadcast"]
            assert not sent[ALL_GATHER]
            # Five products of every block; and, once in a while, the norms of rows and columns.
            rounds = [n for n in sent["all_reduce"] if n != 5 * blocks]
            assert len(sent["all_reduce"]) == 1 + len(rounds)
            assert len(rounds) == (step == EVERY - 1)
            assert sum(rounds) <= ends
            # What a rank holds of the two matrices that are orthogonalised is sent there and back.
            assert len(sent["all_to_all_single"]) == 2
            assert sum(sent["all_to_all_single"]) <= 1.1 * matrices
    first = [by_name["BalancedMuon"][0]["all_to_all_single"] for by_name in ranks]
    assert sum(map(sum, first)) == 2 * matrices


def check_paths(ranks):
    for by_name in ranks:
        for name in ("PathSGD", "PathNormalized"):
            for step, sent in enumerate(by_name[name]):
                numbers = [n for calls in sent.values() for n in calls]
                assert max(numbers) <= 80 + 70 + 5, name  # the biases of all layers are sent together
                assert sum(numbers) < sum(p.numel() for p in make_stack().parameters()) / 10, name
                # Biases, and each way a vector and its exponent for all layers but one; clipping measures
                # gamma for the step after it, and adds up one number for each parameter.
                assert len(numbers) == 1 + 2 * 2 * 2 + (step == 1), name
        numbers = [n for sent in by_name["convolutions"] for calls in sent.values() for n in calls]
        assert max(numbers) <= 16 * 3 * 3  # channels times places
