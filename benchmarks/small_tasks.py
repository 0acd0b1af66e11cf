"""PathMuon and PathAdam at their defaults beside AdamW's best of four rates: eight small tasks on a CPU.

Each from torch's initialisation and from the same function with units rescaled at random; one seed. About
half an hour on one core. Writes results/optim/relative-small-tasks-cpu.txt; without a schedule, from torch's
initialisation alone, results/optim/no-schedule-cpu.txt.

    python benchmarks/small_tasks.py [--no-schedule] [TASK ...]
"""

from __future__ import annotations

import functools
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import pathsgd

OUT = Path(__file__).resolve().parent.parent / "results" / "optim"
STEPS, LENGTH, LETTERS, VALIDATION = 300, 32, 128, 400
STARTS = ("as initialised", "rescaled")


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Images and labels, shuffled; the first VALIDATION are not trained on."""
    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(data.data, dtype=torch.float32)[order] / 16 - 0.3) / 0.38
    return x, torch.tensor(data.target)[order]


@functools.cache
def text() -> Tensor:
    """Source of Python's standard library, which differs a little between versions."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    letters = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(letters, dtype=torch.uint8).long() % LETTERS


class Block(nn.Module):
    """Attention and an MLP, each after a layer norm and added to the stream."""

    def __init__(self, width: int, causal: bool, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.causal, self.activation = causal, activation
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out, self.second = nn.Linear(width, width, bias=False), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.activation(self.up(self.second(x))))


class Stream(nn.Module):
    """Embeds its input, adds positions, runs two blocks, and reads the stream out."""

    def __init__(self, embed: nn.Module, places: int, width: int, outputs: int, language: bool) -> None:
        super().__init__()
        self.embed, self.language = embed, language
        self.places = nn.Parameter(0.02 * torch.randn(places, width))
        activation = (lambda x: x.relu().square()) if language else F.relu
        self.blocks = nn.Sequential(*[Block(width, language, activation) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs, bias=not language)

    def forward(self, x: Tensor) -> Tensor:
        if not self.language:  # 16 patches of 2 x 2
            x = x.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        x = self.norm(self.blocks(self.embed(x) + self.places))
        return self.head(x if self.language else x.mean(1))


class Rows(nn.Module):
    """Reads a digit row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(8, 64, nonlinearity="relu", batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.view(-1, 8, 8))[0][:, -1])


class Encoder(nn.Module):
    """torch's own encoder layer over the rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x.view(-1, 8, 8))).mean(1))


def mlp(hidden: int) -> nn.Module:
    layers = [layer for _ in range(hidden) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def cnn(norm: bool) -> nn.Module:
    def conv(into: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(into, out, 3, padding=1), *([nn.BatchNorm2d(out)] if norm else []), nn.ReLU()]

    features = [nn.Unflatten(1, (1, 8, 8)), *conv(1, 16), nn.MaxPool2d(2), *conv(16, 32)]
    if norm:
        return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(512, 10))


GPT = "char GPT, width 48"
TASKS: dict[str, Callable[[], nn.Module]] = {
    "MLP 64-64-64-10": lambda: mlp(2),
    "MLP of 10 layers of 64": lambda: mlp(9),
    "CNN": lambda: cnn(norm=False),
    "CNN with batch norm": lambda: cnn(norm=True),
    "nn.RNN, 64 units": Rows,
    "ViT, width 32": lambda: Stream(nn.Linear(4, 32), 16, 32, 10, language=False),
    GPT: lambda: Stream(nn.Embedding(LETTERS, 48), LENGTH, 48, LETTERS, language=True),
    "nn.TransformerEncoderLayer, width 32, GELU": Encoder,
}
Make = Callable[[nn.Module, Tensor], torch.optim.Optimizer]
METHODS: dict[tuple[str, str], Make] = {
    **{
        ("AdamW", f"{lr:g}"): lambda model, x, lr=lr: torch.optim.AdamW(model.parameters(), lr)
        for lr in (0.001, 0.003, 0.01, 0.03)
    },
    ("PathMuon", "default"): pathsgd.PathMuon,
    ('PathMuon, coordinates="weights"', "default"): functools.partial(
        pathsgd.PathMuon, coordinates="weights"
    ),
    ("PathAdam", "default"): pathsgd.PathAdam,
}
WITHOUT_SCHEDULE: dict[tuple[str, str], Make] = {
    **{key: make for key, make in METHODS.items() if key[0] in ("AdamW", "PathMuon", "PathAdam")},
    **{
        (optimizer.__name__, f"{lr:g}"): functools.partial(optimizer, lr=lr)
        for optimizer, default in ((pathsgd.PathMuon, 0.06), (pathsgd.PathAdam, 0.08))
        for lr in (default, default / 4)
    },
}
"""A rate that is given stays as it is; the default falls."""


def batches(task: str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        if task == GPT:
            limit = int(0.9 * len(text())) - LENGTH - 1
            starts = torch.randint(limit, (16,), generator=generator)
            rows = text()[starts[:, None] + torch.arange(LENGTH + 1)]
            yield rows[:, :-1], rows[:, 1:].flatten()
        else:
            x, y = (part[VALIDATION:] for part in digits())
            rows = torch.randint(len(x), (64,), generator=generator)
            yield x[rows], y[rows]


def validation(task: str) -> tuple[Tensor, Tensor]:
    if task != GPT:
        x, y = digits()
        return x[:VALIDATION], y[:VALIDATION]
    letters = text()[int(0.9 * len(text())) :][: 200 * LENGTH + 1]
    return letters[:-1].view(200, LENGTH), letters[1:]


def train(task: str, make: Make, rescaled: bool, schedule: bool = True) -> float:
    """The validation loss after a warm-up of 5% and a cosine; without a schedule the mean of five in the last
    50 steps, since weights keep moving."""
    torch.manual_seed(0)
    model = TASKS[task]()
    example = validation(task)[0][:1]
    if rescaled:
        pathsgd.unbalance(model, example, generator=torch.Generator().manual_seed(3))
    optimizer = make(model, example)
    warm = STEPS // 20
    scheduler = None
    if schedule:
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: min(1, (t + 1) / warm) * 0.5 * (1 + math.cos(math.pi * t / STEPS))
        )
    found = []
    for k, (x, y) in enumerate(batches(task)):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        left = STEPS - 1 - k
        if left == 0 or (not schedule and left in (10, 20, 30, 40)):
            found.append(validate(task, model))
    return sum(found) / len(found)


@torch.no_grad()
def validate(task: str, model: nn.Module) -> float:
    model.eval()
    x, y = validation(task)
    loss = F.cross_entropy(model(x).flatten(0, -2), y).item()
    model.train()
    return loss


def main() -> None:
    torch.set_num_threads(1)
    schedule = "--no-schedule" not in sys.argv
    tasks = [name for name in sys.argv[1:] if name != "--no-schedule"] or list(TASKS)
    if unknown := set(tasks) - set(TASKS):
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(map(repr, TASKS))}")
    lines = [
        f"Validation loss after {STEPS} steps{'' if schedule else ' without a schedule'}, "
        f"one seed, one thread of a CPU, torch {torch.__version__}.",
        "start\ttask\tmethod\tlr\tloss",
    ]
    for start in STARTS if schedule else STARTS[:1]:
        for task in tasks:
            for (method, lr), make in (METHODS if schedule else WITHOUT_SCHEDULE).items():
                loss = train(task, make, start == "rescaled", schedule)
                lines.append(f"{start}\t{task}\t{method}\t{lr}\t{loss:.3f}")
                print(lines[-1], flush=True)
    if len(tasks) == len(TASKS):
        name = "relative-small-tasks-cpu.txt" if schedule else "no-schedule-cpu.txt"
        (OUT / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
