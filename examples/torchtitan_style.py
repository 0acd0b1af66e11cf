"""FSDP2 as in torchtitan: a GPT is made on the meta device, sharded by block and then initialised. Gradients
are clipped, lr follows a schedule, and halfway the training is saved by DCP and resumed. By BalancedMuon and
by AdamW.

torchrun --nproc-per-node 2 examples/torchtitan_style.py
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import pathsgd

STEPS, BATCH, LENGTH, WIDTH, HEADS, WARMUP = 30, 8, 64, 64, 4, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model():
    with torch.device("meta"):
        model = GPT()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())  # on CPUs every rank draws its own part
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


class Training(Stateful):
    """What a checkpoint holds."""

    def __init__(self, make_optimizer):
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP))
        )

    def run(self, steps, rows):
        for step in steps:
            generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
            batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
            compute_loss(self.model, batch).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.schedule.load_state_dict(state["schedule"])


def compute_loss(model, rows):
    return F.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, rows):
    return compute_loss(model, rows).item()


def train(make_optimizer, train_rows, test_rows, folder):
    training = Training(make_optimizer)
    training.run(range(STEPS // 2), train_rows)
    dcp.save({"training": training}, checkpoint_id=folder)
    saved = evaluate(training.model, test_rows)

    training = Training(make_optimizer)  # as after a restart
    dcp.load({"training": training}, checkpoint_id=folder)
    assert evaluate(training.model, test_rows) == saved
    training.run(range(STEPS // 2, STEPS), train_rows)
    return evaluate(training.model, test_rows)


def main():
    dist.init_process_group("gloo")
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    held_out = torch.arange(len(rows)) % 10 == 0
    makers = {
        "BalancedMuon": lambda model: pathsgd.BalancedMuon(model, rows[:1]),
        "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-2),
    }
    losses = {}
    for name, make_optimizer in makers.items():
        folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folders)
        losses[name] = train(make_optimizer, rows[~held_out], rows[held_out], folders[0])
        if dist.get_rank() == 0:
            shutil.rmtree(folders[0])
    if dist.get_rank() == 0:
        print(f"test loss: BalancedMuon {losses['BalancedMuon']:.3f}, AdamW {losses['AdamW']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
