"""The tasks: CIFAR-10, digits, and the bytes of Python's standard library. All data stays on the device."""

from __future__ import annotations

import functools
import hashlib
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .pack import read_cifar

Batch = tuple[Tensor, Tensor]


class Task(Protocol):
    """Data of an epoch of training and of the validation after it."""

    steps: int
    metric: str
    classes: int
    data_hash: str

    @property
    def example(self) -> Tensor:
        """One input, for its shape."""

    def epoch(self, generator: torch.Generator) -> Iterator[Batch]:
        """Inputs and targets of every step."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Numbers on the held-out data, ``metric`` among them."""

    def shortened(self, steps: int) -> Task:
        """At most so many steps an epoch and a small validation, to try things out."""


@dataclass(frozen=True)
class Images:
    """Classification. An epoch goes through the data in random order, again and again if it is small."""

    x: Tensor
    y: Tensor
    x_valid: Tensor
    y_valid: Tensor
    steps: int
    batch: int
    flip: bool
    metric: str
    data_hash: str = ""
    classes: int = 10

    @property
    def example(self) -> Tensor:
        return self.x[:1]

    def epoch(self, generator: torch.Generator) -> Iterator[Batch]:
        device, count = self.x.device, len(self.x)
        rounds = math.ceil(self.steps * self.batch / count)
        orders = [torch.randperm(count, generator=generator, device=device) for _ in range(rounds)]
        chosen = torch.cat(orders)[: self.steps * self.batch].view(self.steps, self.batch)
        flips = torch.rand(chosen.shape, generator=generator, device=device) < 0.5
        for rows, flip in zip(chosen, flips, strict=True):
            x = self.x[rows]
            if self.flip:
                x = torch.where(flip[:, None, None, None], x.flip(3), x)
            yield x, self.y[rows]

    @torch.no_grad()
    def validate(self, model: nn.Module) -> dict[str, float]:
        scores = torch.cat([model(x) for x in self.x_valid.split(1000)])
        wrong = scores.argmax(1) != self.y_valid
        return {
            "error": 100 * wrong.float().mean().item(),
            "loss": F.cross_entropy(scores, self.y_valid).item(),
        }

    def shortened(self, steps: int) -> Images:
        steps = min(steps, self.steps)
        return replace(self, steps=steps, x_valid=self.x_valid[:200], y_valid=self.y_valid[:200])


@dataclass(frozen=True)
class Text:
    """The next byte, from those before it."""

    train: Tensor
    valid: Tensor
    steps: int
    batch: int
    context: int
    data_hash: str = ""
    pieces: int = 512
    metric: str = "loss"
    classes: int = 256

    @property
    def example(self) -> Tensor:
        return torch.zeros(1, self.context, dtype=torch.long, device=self.train.device)

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        pieces = text[starts[:, None] + torch.arange(self.context + 1, device=text.device)].long()
        return pieces[:, :-1], pieces[:, 1:]

    def epoch(self, generator: torch.Generator) -> Iterator[Batch]:
        last, device = len(self.train) - self.context, self.train.device
        for starts in torch.randint(last, (self.steps, self.batch), generator=generator, device=device):
            yield self._cut(self.train, starts)

    @torch.no_grad()
    def validate(self, model: nn.Module) -> dict[str, float]:
        starts = torch.linspace(
            0, len(self.valid) - self.context - 1, self.pieces, device=self.valid.device
        ).long()
        losses = [
            F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            for x, y in (self._cut(self.valid, part) for part in starts.split(64))
        ]
        return {"loss": torch.stack(losses).mean().item()}

    def shortened(self, steps: int) -> Text:
        return replace(self, steps=min(steps, self.steps), pieces=16)


@functools.cache
def cifar(folder: Path, device: str) -> Images:
    """20000 images of CIFAR-10, normalised per channel, and its 10000 test images."""
    data = read_cifar(folder)
    digest = _hash(data[0].numpy().tobytes())
    x, y, x_valid, y_valid = (t.to(device) for t in data)
    x, x_valid = x.float() / 255, x_valid.float() / 255
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    x, x_valid = (x - mean) / std, (x_valid - mean) / std
    steps = len(x) // 128
    return Images(x, y.long(), x_valid, y_valid.long(), steps, 128, False, "error", digest)


def digits(device: str) -> Images:
    """sklearn's 1797 digits of 8x8, 360 of them held out. The loss tells more than the few errors."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    x = (x - x[360:].mean()) / x[360:].std()
    x, y = x.to(device), y.to(device)
    return Images(x[360:], y[360:], x[:360], y[:360], 60, 64, False, "loss")


def text(device: str, *, context: int, batch: int, steps: int) -> Text:
    """The sources of the running Python's standard library, of which the last 5% are held out. They differ
    between versions of Python, so records carry their hash."""
    raw = _standard_library()
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
    cut = int(0.95 * len(data))
    return Text(data[:cut], data[cut:], steps, batch, context, _hash(raw))


@functools.cache
def _standard_library() -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]
    return b"".join(p.read_bytes() for p in paths if "site-packages" not in p.parts)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


TASKS = {
    "cifar": lambda folder, device: cifar(folder, device),
    "cifar flipped": lambda folder, device: replace(cifar(folder, device), flip=True),
    "digits": lambda folder, device: digits(device),
    "bytes": lambda folder, device: text(device, context=128, batch=64, steps=150),
    "short bytes": lambda folder, device: text(device, context=64, batch=32, steps=60),
}


@functools.cache
def load_task(name: str, folder: Path, device: str) -> Task:
    """Once in a process."""
    return TASKS[name](folder, device)
