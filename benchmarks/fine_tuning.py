"""Fine-tuning: PathMuon and PathAdam at their default rate and below, beside AdamW at seven rates.

Three networks that AdamW has trained go on with a few examples of another task; three seeds. About half an
hour on one core. DATA holds MNIST and SVHN, as `python -m study data` downloads them. Writes
results/optim/fine-tuning-cpu.txt.

    PYTHONPATH=. python benchmarks/fine_tuning.py DATA [TASK ...]
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from small_tasks import LETTERS, Block, Stream
from torch import Tensor, nn
from torch.nn import functional as F

import pathsgd
from study.sources import load

OUT = Path(__file__).resolve().parent.parent / "results" / "optim" / "fine-tuning-cpu.txt"
SEEDS, STEPS, LENGTH = 3, 200, 32
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
FRACTIONS = (1, 3, 10, 30, 100)


@dataclass(frozen=True)
class Data:
    """Examples to train on and examples held out."""

    x: Tensor
    y: Tensor
    x_valid: Tensor
    y_valid: Tensor

    def classes(self, first: int, last: int) -> Data:
        """The images of these classes, counted from 0."""
        train, valid = ((y >= first) & (y <= last) for y in (self.y, self.y_valid))
        return Data(self.x[train], self.y[train] - first, self.x_valid[valid], self.y_valid[valid] - first)

    def few(self, count: int, seed: int) -> Data:
        """Only some of the training examples."""
        rows = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))[:count]
        return Data(self.x[rows], self.y[rows], self.x_valid, self.y_valid)


@functools.cache
def images(name: str, folder: Path) -> Data:
    """Grey images of 16 x 16, each with mean 0 and standard deviation 1; 5000 held out."""
    data = load(name, folder, download=False)

    def prepare(x: Tensor) -> Tensor:
        x = x.view(-1, *data.shape).float().mean(1, keepdim=True)
        x = F.avg_pool2d(F.pad(x, [(32 - x.shape[3]) // 2] * 4), 2)
        return (x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1)

    return Data(prepare(data.train_x), data.train_y, prepare(data.test_x[:5000]), data.test_y[:5000])


@functools.cache
def text(kind: str) -> Data:
    """Rows of letters: "code" is Python's standard library, "prose" the reference manual that pydoc carries.
    Of every 1000 rows the last 100 are held out, of these 800 are used."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if kind == "code":
        raw = b"".join(file.read_bytes() for file in sorted(root.glob("*.py")))
    else:
        from pydoc_data.topics import topics

        raw = "\n".join(topics[name] for name in sorted(topics)).encode()
    letters = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() % LETTERS
    rows = letters.unfold(0, LENGTH + 1, LENGTH)
    held_out = torch.arange(len(rows)) // 100 % 10 == 9
    train, valid = rows[~held_out], rows[held_out][:800]
    return Data(train[:, :-1], train[:, 1:], valid[:, :-1], valid[:, 1:])


def cnn() -> nn.Module:
    def conv(into: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]

    body = [*conv(1, 24), nn.MaxPool2d(2), *conv(24, 48), *conv(48, 48), nn.MaxPool2d(2), *conv(48, 96)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


class ViT(nn.Module):
    """Patches of 4 x 4, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Conv2d(1, 48, 4, stride=4), nn.Parameter(0.02 * torch.randn(16, 48))
        self.blocks = nn.Sequential(*[Block(48, causal=False, activation=F.relu) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


@dataclass(frozen=True)
class Task:
    """A network, what it was trained on, and what it is fine-tuned on."""

    build: Callable[[], nn.Module]
    old: Callable[[Path], Data]
    new: Callable[[Path], Data]
    examples: int
    steps: int
    """Of the training before."""
    fresh_head: bool = False


TASKS = {
    "GPT, code to prose": Task(
        lambda: Stream(nn.Embedding(LETTERS, 64), LENGTH, 64, LETTERS, language=True),
        old=lambda _: text("code"), new=lambda _: text("prose"), examples=1000, steps=4000,
    ),
    "CNN with batch norm, SVHN to MNIST": Task(
        cnn, old=lambda folder: images("svhn", folder), new=lambda folder: images("mnist", folder),
        examples=200, steps=3000,
    ),
    "ViT, MNIST 0-4 to 5-9, fresh head": Task(
        ViT, old=lambda folder: images("mnist", folder).classes(0, 4),
        new=lambda folder: images("mnist", folder).classes(5, 9), examples=100, steps=3000, fresh_head=True,
    ),
}  # fmt: skip
Make = Callable[[nn.Module, Tensor], torch.optim.Optimizer]


def adamw(lr: float) -> Make:
    return lambda model, _: torch.optim.AdamW(model.parameters(), lr)


def methods() -> dict[tuple[str, str], Make]:
    found: dict[tuple[str, str], Make] = {("AdamW", f"{lr:g}"): adamw(lr) for lr in RATES}
    for form, default in ((pathsgd.PathAdam, 0.08), (pathsgd.PathMuon, 0.06)):
        for k in FRACTIONS:
            label = f"default / {k}" if k > 1 else "default"
            found[form.__name__, label] = functools.partial(form, lr=default / k)
    return found


def train(model: nn.Module, data: Data, make: Make, steps: int, seed: int, batch: int) -> None:
    """With a warm-up of 5% and a cosine."""
    optimizer = make(model, data.x[:1])
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1, (t + 1) / (steps // 20)) * 0.5 * (1 + math.cos(math.pi * t / steps))
    )
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(data.x), (batch,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(data.x[rows]).flatten(0, -2), data.y[rows].flatten()).backward()
        optimizer.step()
        scheduler.step()


@torch.no_grad()
def validate(model: nn.Module, data: Data) -> tuple[float, float]:
    """Loss in nats and error in percent on what is held out."""
    model.eval()
    scores = torch.cat([model(x) for x in data.x_valid.split(500)]).flatten(0, -2)
    y = data.y_valid.flatten()
    return F.cross_entropy(scores, y).item(), 100 * (scores.argmax(1) != y).float().mean().item()


@functools.cache
def trained(name: str, folder: Path) -> nn.Module:
    """The network as AdamW leaves it, before it is fine-tuned: one for all seeds, as there is in use."""
    task = TASKS[name]
    torch.manual_seed(0)
    model = task.build()
    train(model, task.old(folder), adamw(3e-3), task.steps, seed=0, batch=32)
    return model


def fine_tune(name: str, folder: Path, seed: int, make: Make | None, scratch: bool = False) -> list[float]:
    """Loss and error on the new task, then on the old one. Without ``make`` the network stays as it was."""
    task = TASKS[name]
    start = trained(name, folder)  # before the seed is set: the first call trains
    torch.manual_seed(100 + seed)
    model = task.build() if scratch else copy.deepcopy(start)
    if task.fresh_head:
        head = model.head
        model.head = nn.Linear(head.in_features, head.out_features)
    new = task.new(folder).few(task.examples, seed)
    if make is not None:
        train(model, new, make, STEPS, seed, batch=16)
    found = [*validate(model, new)]
    if task.fresh_head:
        model.head = head  # the old task is asked of the old head
    return [*found, *validate(model, task.old(folder))]


def main() -> None:
    torch.set_num_threads(1)
    if not sys.argv[1:] or not set(sys.argv[2:]) <= set(TASKS):
        raise SystemExit(f"{__doc__}\nTASK is one of {', '.join(map(repr, TASKS))}")
    folder, tasks = Path(sys.argv[1]), sys.argv[2:] or list(TASKS)
    lines = [
        f"Held-out loss in nats and error in percent after {STEPS} steps of fine-tuning: of the new task,",
        "then of the one the network was trained on before. Mean and deviation over three seeds, which",
        "choose examples, order and head; the network before is the same. Not fine-tuned: as it was.",
        f"From scratch: from a random start, with the same examples. One thread, torch {torch.__version__}.",
        "task\tmethod\tlr\tnew loss\tnew error\told loss\told error",
    ]
    rows: list[tuple[str, str, Make | None, bool]] = [
        ("not fine-tuned", "", None, False),
        *((method, lr, make, False) for (method, lr), make in methods().items()),
        ("PathMuon from scratch", "default", pathsgd.PathMuon, True),
    ]
    for name in tasks:
        for method, lr, make, scratch in rows:
            runs = [fine_tune(name, folder, seed, make, scratch) for seed in range(SEEDS)]
            cells = [
                f"{statistics.mean(values):.{digits}f} +- {statistics.stdev(values):.{digits}f}"
                for values, digits in zip(zip(*runs, strict=True), (3, 1, 3, 1), strict=True)
            ]
            lines.append("\t".join([name, method, lr, *cells]))
            print(lines[-1], flush=True)
    if len(tasks) == len(TASKS):
        OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
