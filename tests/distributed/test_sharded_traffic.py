"""Numbers that ranks send in a step of a sharded model: vectors as wide as a layer, a few numbers for each
block, and Muon's matrices."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from pathsgd import PathAdam, PathMuon, PathSGD
from pathsgd._torch import ALL_GATHER
from support.collectives import counted_numbers
from support.ranks import run_on_ranks

OPTIMIZERS = {
    "PathMuon": PathMuon,
    "PathAdam": PathAdam,
    "relative PathSGD": lambda m, x: PathSGD(m, x, relative=True),
    "PathSGD": PathSGD,
}
STACK = (50, 80, 70, 5)


def make_stack():
    a, b, c, d = STACK
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))


def make_convolutions():
    convolutions = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 5))


def count_numbers():
    """How many numbers a rank sends in a step, by optimizer and kind of call."""
    found = {}
    cases = [(name, make_stack, torch.ones(1, 50)) for name in OPTIMIZERS]
    for name, make, x in [*cases, ("convolutions", make_convolutions, torch.ones(1, 3, 5, 5))]:
        model = fully_shard(make())
        optimizer = OPTIMIZERS.get(name, PathSGD)(model, x)
        model(x).sum().backward()
        with counted_numbers() as sent, CommDebugMode() as calls:
            optimizer.step()
        assert sum(map(len, sent.values())) == calls.get_total_counts()  # DTensor sends nothing by itself
        found[name] = sent
    return found


def test_what_is_sent():
    ranks = run_on_ranks(count_numbers, 2)
    check_relative_steps(ranks)
    check_plain_steps(ranks)


def check_relative_steps(ranks):
    widest, biases, blocks, columns = 80, 80 + 70 + 5, 6, 50 + 80 + 70
    for found in ranks:
        for name in ("PathMuon", "PathAdam", "relative PathSGD"):
            sent = found[name]
            gathers, sums, exchanged = (sent[key] for key in (ALL_GATHER, "all_reduce", "all_to_all_single"))
            assert len(gathers) <= 4, name  # of layers, and of all biases together
            assert max(gathers) <= biases, name
            # PathAdam multiplies steps by vectors, all blocks together.
            assert max(sums) <= (columns if name == "PathAdam" else widest), name
            # Sizes, gradients and turns; the directions that SGD normalises.
            assert sum(n <= 3 * blocks for n in sums) == (4 if name == "relative PathSGD" else 3), name
            assert not sent["broadcast"]
            # What a rank holds of the two matrices that are orthogonalised is sent there and back.
            matrices = 80 * 50 + 70 * 80
            assert len(exchanged) == (2 if name == "PathMuon" else 0)
            assert sum(exchanged) <= 1.1 * matrices
    assert sum(sum(found["PathMuon"]["all_to_all_single"]) for found in ranks) == 2 * matrices


def check_plain_steps(ranks):
    for found in ranks:
        sent = [n for numbers in found["PathSGD"].values() for n in numbers]
        assert max(sent) <= 80 + 70 + 5  # the biases of all layers are sent together
        assert sum(sent) < sum(p.numel() for p in make_stack().parameters()) / 10
        sent = [n for numbers in found["convolutions"].values() for n in numbers]
        assert max(sent) <= 16 * 3 * 3  # channels times places
