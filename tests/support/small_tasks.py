"""Small networks to train on a CPU in seconds: on digits, and on the letters of a made-up language."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 64
VALIDATION = 400
LENGTH = 32
LETTERS = 27


@functools.cache
def digits():
    """(training images, classes, validation images, classes): 8 x 8 pixels, shuffled once."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = ((torch.tensor(data.data, dtype=torch.float32) / 16 - 0.3) / 0.38)[order]
    y = torch.tensor(data.target)[order]
    return x[VALIDATION:], y[VALIDATION:], x[:VALIDATION], y[:VALIDATION]


@functools.cache
def text():
    """(training letters, validation letters): words out of 64, each followed by one of four others."""
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(1, LETTERS, (int(n),), generator=generator) for n in 2 + torch.arange(64) % 6]
    follow = torch.randint(64, (64, 4), generator=generator)
    space = torch.zeros(1, dtype=torch.int64)
    word, letters = 0, []
    for pick in torch.randint(4, (12000,), generator=generator).tolist():
        letters += [words[word], space]
        word = int(follow[word, pick])
    joined = torch.cat(letters)
    cut = len(joined) - 100 * LENGTH - 1
    return joined[:cut], joined[cut:]


def conv(into, out, norm):
    layers = [nn.Conv2d(into, out, 3, padding=1, bias=not norm)]
    return [*layers, nn.BatchNorm2d(out), nn.ReLU()] if norm else [*layers, nn.ReLU()]


def cnn(norm):
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), *conv(1, 16, norm), nn.MaxPool2d(2), *conv(16, 32, norm),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


class Attention(nn.Module):
    """A pre-norm block: queries, keys and values in one matrix, and an MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.second = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        split = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*split.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.table, self.places = (
            nn.Embedding(LETTERS, width),
            nn.Parameter(0.02 * torch.randn(LENGTH, width)),
        )
        self.blocks = nn.Sequential(*[Attention(width, 4) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.table(tokens) + self.places)))


NETWORKS = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    ),
    "cnn": lambda: cnn(norm=False),
    "batch-norm": lambda: cnn(norm=True),
    "gpt": Gpt,
}


def build(name, seed=0):
    """(model, example input)."""
    torch.manual_seed(seed)
    example = torch.zeros(1, LENGTH, dtype=torch.int64) if name == "gpt" else torch.zeros(1, 64)
    return NETWORKS[name](), example


def batches(name, seed, steps):
    generator = torch.Generator().manual_seed(5 + seed)
    if name == "gpt":
        letters = text()[0]
        for _ in range(steps):
            starts = torch.randint(len(letters) - LENGTH, (BATCH // 4,), generator=generator)
            rows = letters[starts[:, None] + torch.arange(LENGTH + 1)]
            yield rows[:, :-1], rows[:, 1:].flatten()
    else:
        x, y, _, _ = digits()
        for _ in range(steps):
            rows = torch.randint(len(x), (BATCH,), generator=generator)
            yield x[rows], y[rows]


def train(name, make, seed=0, steps=150):
    """The validation loss after training with a warm-up of a twentieth, then half a cosine."""
    model, example = build(name, seed)
    optimizer = make(model, example)
    warm = steps // 20

    def schedule(step):
        return min(1, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for x, y in batches(name, seed, steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y).backward()
        optimizer.step()
        scheduler.step()
    return validate(name, model)


@torch.no_grad()
def validate(name, model):
    model.eval()
    if name != "gpt":
        _, _, x, y = digits()
        return F.cross_entropy(model(x), y).item()
    letters = text()[1]
    logits = model(letters[:-1].view(-1, LENGTH))
    return F.cross_entropy(logits.flatten(0, 1), letters[1:]).item()
