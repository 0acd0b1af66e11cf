"""Differences between training on ranks and in one process, of every optimizer after 50 steps.

    PYTHONPATH=src:tests python -W ignore -m support.agreement [2|4]

Takes some minutes. The parameter that differs most is named. torch's own optimizers show what is due to
gradients. results/distributed/README.md has the numbers.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from support.ranks import run_on_ranks
from support.sharded import Convolutional, Decoder, Mlp, make, parallelize, traced, train

STEPS = 50
NAMES = ("BalancedMuon", "PathSGD", "AdamW on paths", "Adagrad on paths", "SGD", "AdamW")
KINDS = {
    "DDP": (Mlp, Convolutional),
    "FSDP2": (Mlp, Convolutional),
    "tensor parallel": (Decoder,),
    "both": (Decoder,),
}


def prepare():
    for kind in (Mlp, Convolutional, Decoder):
        traced(kind)


def cases(way):
    for kind in KINDS[way]:
        for name in NAMES:
            for dtype in (torch.float32, *([torch.float64] if name == "BalancedMuon" else [])):
                yield kind, name, dtype


def train_everything(way):
    world, results = dist.get_world_size(), []
    for kind, name, dtype in cases(way):
        model, rank = make(kind, dtype), dist.get_rank()
        if way == "DDP":
            model = DistributedDataParallel(model)
        elif way == "FSDP2":
            fully_shard(model)
        elif way == "tensor parallel":
            model, rank = parallelize(model, init_device_mesh("cpu", (world,))), 0
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
            fully_shard(parallelize(model, mesh["tensor"]), mesh=mesh["data"])
            rank = mesh.get_local_rank("data")
        results.append(train(model, kind, name, range(rank, rank + 1), STEPS, dtype))
    return results


def main(world):
    for way in KINDS if world == 4 else list(KINDS)[:-1]:
        results = run_on_ranks(train_everything, world, way)[0]
        for case, (losses, weights) in zip(cases(way), results, strict=True):
            kind, name, dtype = case
            shares = {"tensor parallel": 1, "both": 2}.get(way, world)
            whole_losses, whole = train(make(kind, dtype), kind, name, range(shares), STEPS, dtype)
            gaps = {
                parameter: float((a - b).abs().max())
                for (parameter, _), a, b in zip(make(kind).named_parameters(), weights, whole, strict=True)
            }
            worst = max(gaps, key=gaps.get)
            loss = float((losses[:, 0] - whole_losses[:, -1]).abs().max())
            cells = way, kind.__name__, name, str(dtype)[6:], f"{loss:.0e}", f"{gaps[worst]:.0e}", worst
            print(f"| {world} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    from support import agreement  # ranks load it by its name

    agreement.main(int(sys.argv[1]))
