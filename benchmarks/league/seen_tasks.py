"""Tasks of the seen networks beside images and text: noise to remove, one picture, clicks, a small table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .tasks import Batch, Images, Load, Part, YesNo, cifar, digits

TABLES = [round(10 * 1.25**k) for k in range(20)]
"""Rows of the embedding tables of the recommender: 10 to 694."""


class Denoising(Images):
    """What noise was added to an image? Labels are ignored.

    At time t of [0, 1] an image keeps cos(pi t / 2) of itself and gets sin(pi t / 2) of noise: the cosine
    schedule of diffusion models, whose images have variance 1 at every time.
    """

    @property
    def example(self) -> Any:
        return self.x[:1], self.x.new_full((1,), 0.5)

    def batches(self, model: nn.Module, generator: torch.Generator, steps: int) -> Iterator[Batch]:
        for x, _ in super().batches(model, generator, steps):
            noise = torch.randn(x.shape, generator=generator, device=x.device)
            yield x, noise, torch.rand(len(x), generator=generator, device=x.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, noise, time = batch
        angle = (0.5 * math.pi * time)[:, None, None, None]
        return F.mse_loss(model(angle.cos() * x + angle.sin() * noise, time), noise)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        """Always with the same noise, and at times that are spread evenly: the loss depends on them most."""
        x, _ = self.held_out[part]
        generator = torch.Generator(x.device).manual_seed(0)
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        time = (torch.arange(len(x), device=x.device) + 0.5) / len(x)
        pieces = zip(x.split(500), noise.split(500), time.split(500), strict=True)
        total = sum(len(piece[0]) * self.loss(model, piece) for piece in pieces)
        return {"loss": float(total) / len(x)}


class Pixels(Images):
    """The colour at a place of one picture, by squares. There is no held-out data: both parts are all pixels,
    which are trained on."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        places, colours = batch
        return F.mse_loss(model(places), colours)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        return {"loss": self.loss(model, self.held_out[part]).item()}


def denoising(folder: Path, device: str) -> Denoising:
    """CIFAR-10, mirrored at random."""
    return Denoising(**vars(replace(cifar(folder, device), metric="loss", augment="flip")))


def picture(folder: Path, device: str) -> Pixels:
    """16 images of CIFAR-10 side by side, 128 x 128 pixels; a step sees all of them."""
    data = cifar(folder, device)
    image = data.x[:16].unflatten(0, (4, 4)).permute(0, 3, 1, 4, 2).reshape(128 * 128, 3)
    line = torch.linspace(-1, 1, 128, device=image.device)
    places = torch.cartesian_prod(line, line)
    both: dict[Part, tuple[Tensor, Tensor]] = {"valid": (places, image), "test": (places, image)}
    return Pixels(places, image, both, 1000, len(places), metric="loss", data_hash=data.data_hash)


def clicks(device: str) -> YesNo:
    """20000 clicks that a hidden model draws, given one row of each of 20 tables; the k-th row is 1/k as
    frequent as the first. Many rows are seen a few times only, so tables can fit the noise of clicks."""
    generator = torch.Generator().manual_seed(0)
    count = 28000
    columns, effects, factors = [], torch.zeros(count), []
    for size in TABLES:
        often = 1 / torch.arange(1, size + 1)
        rows = torch.multinomial(often, count, replacement=True, generator=generator)
        columns.append(rows)
        effects += 0.6 * torch.randn(size, generator=generator)[rows]
        factors.append(0.3 * torch.randn(size, 4, generator=generator)[rows])
    stacked = torch.stack(factors)
    pairs = 0.5 * (stacked.sum(0).square() - stacked.square().sum(0)).sum(1)
    y = torch.bernoulli(torch.sigmoid(effects + pairs - 1), generator=generator)
    x = torch.stack(columns, 1)
    digest = hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest()[:12]
    x, y = x.to(device), y.to(device)
    held_out: dict[Part, tuple[Tensor, Tensor]] = {
        "valid": (x[:4000], y[:4000]), "test": (x[4000:8000], y[4000:8000]),
    }  # fmt: skip
    return YesNo(x[8000:], y[8000:], held_out, 800, 256, metric="loss", data_hash=digest)


def table(device: str) -> Images:
    """sklearn's 569 breast cancers of 30 columns: 229 to train on, twice 170 held out."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].to(device), y[order].to(device)
    x = (x - x[340:].mean(0)) / x[340:].std(0)
    held_out: dict[Part, tuple[Tensor, Tensor]] = {
        "valid": (x[:170], y[:170]), "test": (x[170:340], y[170:340]),
    }  # fmt: skip
    return Images(x[340:], y[340:], held_out, steps=300, batch=32, metric="loss")


def half_of_digits(device: str, first: int) -> Images:
    """The digits ``first`` to ``first + 4``, as classes 0 to 4; the others were or will be learned apart."""
    data = digits(device)

    def chosen(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        keep = (y >= first) & (y < first + 5)
        return x[keep], y[keep] - first

    x, y = chosen(data.x, data.y)
    held_out = {part: chosen(*pair) for part, pair in data.held_out.items()}
    return replace(data, x=x, y=y, held_out=held_out, steps=200)


SEEN_TASKS: dict[str, Load] = {
    "denoising": denoising,
    "picture": picture,
    "clicks": lambda folder, device: clicks(device),
    "table": lambda folder, device: table(device),
    "digits, 100 steps": lambda folder, device: replace(digits(device), steps=100),
    "digits, 30 steps": lambda folder, device: replace(digits(device), steps=30),
    "digits from 5": lambda folder, device: half_of_digits(device, 5),
}
"""Each is made by ``load(folder of data, device)``."""
