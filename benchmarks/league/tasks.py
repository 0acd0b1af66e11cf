"""What networks are trained on: batches, a loss, and numbers on held-out data. All data stays on the device.

Rates are chosen on the part "valid"; tables show the part "test", which chose nothing.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .pack import read_cifar

Batch = tuple[Tensor, ...]
Part = Literal["valid", "test"]


class Task(Protocol):
    """One problem, whatever the network."""

    @property
    def metric(self) -> str:
        """Which of the numbers of ``evaluate`` is compared; less is better."""

    @property
    def steps(self) -> int:
        """Of a run of length 1."""

    @property
    def batch(self) -> int:
        """Examples of a step."""

    @property
    def data_hash(self) -> str:
        """Of the data, for the records."""

    @property
    def example(self) -> Any:
        """What the model is called with, for its shapes: a tensor, a tuple or a dict."""

    def batches(self, model: nn.Module, generator: torch.Generator, steps: int) -> Iterator[Batch]:
        """The data of every step, always of the same shapes."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """What is minimised."""

    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        """Numbers of a model in evaluation mode on held-out data, ``metric`` among them."""


@dataclass(frozen=True)
class Images:
    """Classification. Goes through the data in random order, again and again.

    Attributes:
        x, y: of training.
        held_out: images and labels by part.
        augment: what is done to images: nothing, mirrored at random, or also shifted by up to four pixels.
        prepare: makes of images what the model is called with.
    """

    x: Tensor
    y: Tensor
    held_out: dict[Part, tuple[Tensor, Tensor]]
    steps: int
    batch: int
    metric: str = "error"
    augment: Literal["", "flip", "crop"] = ""
    data_hash: str = ""

    @property
    def example(self) -> Tensor:
        return self.x[:1]

    def batches(self, model: nn.Module, generator: torch.Generator, steps: int) -> Iterator[Batch]:
        device, count = self.x.device, len(self.x)
        order = torch.empty(0, dtype=torch.long, device=device)
        for _ in range(steps):
            while len(order) < self.batch:
                order = torch.cat([order, torch.randperm(count, generator=generator, device=device)])
            rows, order = order[: self.batch], order[self.batch :]
            yield self._augment(self.x[rows], generator), self.y[rows]

    def _augment(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if not self.augment:
            return x
        count, side, device = len(x), x.shape[-1], x.device
        flip = torch.rand(count, 1, 1, 1, generator=generator, device=device) < 0.5
        x = torch.where(flip, x.flip(3), x)
        if self.augment == "flip":
            return x
        rows, columns = torch.randint(0, 9, (2, count, 1), generator=generator, device=device)
        places = torch.arange(side, device=device)
        n, rows, columns = torch.arange(count, device=device)[:, None, None], rows + places, columns + places
        padded = F.pad(x, (4, 4, 4, 4), mode="reflect").permute(0, 2, 3, 1)
        return padded[n, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        x, y = self.held_out[part]
        scores = torch.cat([model(piece) for piece in x.split(1000)])
        return {
            "error": 100 * (scores.argmax(1) != y).float().mean().item(),
            "loss": F.cross_entropy(scores, y).item(),
        }


class YesNo(Images):
    """Rows of a table, each with a yes or a no that the model has one score for."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.binary_cross_entropy_with_logits(model(x).flatten(), y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        x, y = self.held_out[part]
        scores = model(x).flatten()
        return {
            "error": 100 * ((scores > 0) != (y > 0.5)).float().mean().item(),
            "loss": F.binary_cross_entropy_with_logits(scores, y).item(),
        }


@dataclass(frozen=True)
class Text:
    """The next byte, from those before it."""

    parts: dict[str, Tensor]
    steps: int
    batch: int
    context: int
    pieces: int = 512
    metric: str = "loss"
    data_hash: str = ""

    @property
    def example(self) -> Tensor:
        return torch.zeros(1, self.context, dtype=torch.long, device=self.parts["train"].device)

    def _cut(self, part: str, starts: Tensor) -> Batch:
        text = self.parts[part]
        pieces = text[starts[:, None] + torch.arange(self.context + 1, device=text.device)].long()
        return pieces[:, :-1], pieces[:, 1:]

    def batches(self, model: nn.Module, generator: torch.Generator, steps: int) -> Iterator[Batch]:
        train = self.parts["train"]
        last = len(train) - self.context
        for _ in range(steps):
            yield self._cut(
                "train", torch.randint(last, (self.batch,), generator=generator, device=train.device)
            )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        text = self.parts[part]
        starts = torch.linspace(0, len(text) - self.context - 1, self.pieces, device=text.device).long()
        losses = [self.loss(model, self._cut(part, some)) for some in starts.split(64)]
        return {"loss": torch.stack(losses).mean().item()}


@functools.cache
def cifar(folder: Path, device: str) -> Images:
    """20000 images of CIFAR-10, normalised per channel; held out are 5000 and 10000 other training images,
    since constants of this library were once chosen on the official test images."""
    data = read_cifar(folder)
    digest = _hash(b"".join(x.numpy().tobytes() for x, _ in data.values()))
    train = data["train"][0].float() / 255
    mean, std = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    parts = {
        part: (((x.float() / 255 - mean) / std).to(device), y.long().to(device))
        for part, (x, y) in data.items()
    }
    held_out: dict[Part, tuple[Tensor, Tensor]] = {"valid": parts["valid"], "test": parts["test"]}
    return Images(*parts["train"], held_out, steps=780, batch=128, data_hash=digest)


def digits(device: str) -> Images:
    """sklearn's 1797 digits of 8x8, 360 held out twice. The loss tells more than the few errors."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].to(device), y[order].to(device)
    x = (x - x[720:].mean()) / x[720:].std()
    held_out: dict[Part, tuple[Tensor, Tensor]] = {
        "valid": (x[:360], y[:360]), "test": (x[360:720], y[360:720]),
    }  # fmt: skip
    return Images(x[720:], y[720:], held_out, steps=300, batch=64, metric="loss")


def text(device: str, *, context: int, batch: int, steps: int) -> Text:
    """The sources of the running Python's standard library, of which 5% and 5% are held out. They differ
    between versions of Python, so records carry their hash."""
    raw = _standard_library()
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
    first, second = int(0.9 * len(data)), int(0.95 * len(data))
    parts = {"train": data[:first], "test": data[first:second], "valid": data[second:]}
    return Text(parts, steps, batch, context, data_hash=_hash(raw))


@functools.cache
def _standard_library() -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]
    return b"".join(p.read_bytes() for p in paths if "site-packages" not in p.parts)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


Load = Callable[[Path, str], Task]
TASKS: dict[str, Load] = {
    "cifar": cifar,
    "cifar flipped": lambda folder, device: replace(cifar(folder, device), augment="flip"),
    "cifar shifted": lambda folder, device: replace(cifar(folder, device), augment="crop"),
    "digits": lambda folder, device: digits(device),
    "bytes": lambda folder, device: text(device, context=128, batch=64, steps=750),
    "short bytes": lambda folder, device: text(device, context=64, batch=32, steps=300),
}
"""Each is made by ``load(folder of data, device)``."""
