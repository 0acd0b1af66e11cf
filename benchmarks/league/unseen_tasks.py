"""Tasks of the networks that were fixed before any optimizer had trained them, and are run once."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .tasks import Batch, Images, Load, Part, YesNo, cifar, text
from .unseen_control import CartPole
from .unseen_pack import read_packed
from .unseen_text import Masked, Spans


@dataclass(frozen=True)
class Nodes:
    """Classification of the nodes of one graph, all of it in every step: a batch of one graph.

    Attributes:
        features: of every node.
        adjacency: with self-loops, normalised symmetrically; dense.
        labels: of every node.
        rows: the nodes of every part.
    """

    features: Tensor
    adjacency: Tensor
    labels: Tensor
    rows: dict[str, Tensor]
    steps: int
    batch: int
    metric: str = "loss"
    data_hash: str = ""

    @property
    def example(self) -> Batch:
        return self.features[None], self.adjacency[None]

    def batches(self, model: nn.Module, generator: torch.Generator, steps: int) -> Iterator[Batch]:
        rows = self.rows["train"]
        for _ in range(steps):
            yield *self.example, rows, self.labels[rows]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        features, adjacency, rows, labels = batch
        return F.cross_entropy(model(features, adjacency)[0, rows], labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        rows = self.rows[part]
        scores, labels = model(*self.example)[0, rows], self.labels[rows]
        return {
            "error": 100 * (scores.argmax(1) != labels).float().mean().item(),
            "loss": F.cross_entropy(scores, labels).item(),
        }


@dataclass(frozen=True)
class Autoencoding(Images):
    """The negative ELBO per dimension of images, whose pixels are normal about the model's with variance 1.

    The model makes of images and noise the pixels, and the means and log-variances of its code."""

    code: int = 128

    @property
    def example(self) -> Batch:  # type: ignore[override]
        return self.x[:1], torch.zeros(1, self.code, device=self.x.device)

    def batches(self, model: nn.Module, generator: torch.Generator, steps: int) -> Iterator[Batch]:
        for x, _ in super().batches(model, generator, steps):
            yield x, self._noise(len(x), generator)

    def _noise(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, self.code, generator=generator, device=self.x.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, noise = batch
        pixels, mean, log_variance = model(x, noise)
        misfit = 0.5 * (F.mse_loss(pixels, x) + math.log(2 * math.pi))
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return misfit + divergence / x[0].numel()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        x = self.held_out[part][0]
        generator = torch.Generator(x.device).manual_seed(0)
        total = torch.zeros((), device=x.device)
        for piece in x.split(1000):
            total += len(piece) * self.loss(model, (piece, self._noise(len(piece), generator)))
        return {"negative ELBO": total.item() / len(x)}


@functools.cache
def cora(folder: Path, device: str) -> Nodes:
    """Planetoid's split: 20 papers of each class, 500 and 1000. Features are shares of a paper's words."""
    data, digest = read_packed(folder / "cora.npz")
    papers = len(data["classes"])
    features = torch.zeros(papers, int(data["vocabulary"]))
    features[tuple(torch.from_numpy(data["words"].astype("int64")).T)] = 1
    features = features / features.sum(1, keepdim=True).clamp(min=1)
    adjacency = torch.eye(papers)
    a, b = torch.from_numpy(data["citations"].astype("int64")).T
    adjacency[a, b] = adjacency[b, a] = 1
    scale = adjacency.sum(1).rsqrt()
    adjacency = scale[:, None] * adjacency * scale
    rows = {
        "train": torch.arange(140), "valid": torch.arange(140, 640),
        "test": torch.from_numpy(data["test"].astype("int64")),
    }  # fmt: skip
    return Nodes(
        features.to(device), adjacency.to(device), torch.from_numpy(data["classes"]).long().to(device),
        {part: some.to(device) for part, some in rows.items()}, steps=200, batch=140, data_hash=digest,
    )  # fmt: skip


@functools.cache
def adult(folder: Path, device: str) -> YesNo:
    """Who earns more than 50000, from the census: numbers standardised, words as indicators. A fifth of the
    training rows validates; the test is the published one."""
    data, digest = read_packed(folder / "adult.npz")
    count = int(data["train"])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    valid, train = order[: count // 5], order[count // 5 :]
    numbers = torch.from_numpy(data["numbers"]).float()
    numbers = (numbers - numbers[train].mean(0)) / numbers[train].std(0)
    words = [F.one_hot(column).float() for column in torch.from_numpy(data["words"]).long().T]
    x, y = torch.cat([numbers, *words], 1).to(device), torch.from_numpy(data["rich"]).float().to(device)
    held_out: dict[Part, tuple[Tensor, Tensor]] = {
        "valid": (x[valid], y[valid]), "test": (x[count:], y[count:]),
    }  # fmt: skip
    return YesNo(x[train], y[train], held_out, steps=1000, batch=256, metric="loss", data_hash=digest)


def autoencoding(folder: Path, device: str) -> Autoencoding:
    """CIFAR-10, mirrored at random."""
    images = cifar(folder, device)
    return Autoencoding(
        images.x, images.y, images.held_out, steps=780, batch=128, metric="negative ELBO", augment="flip",
        data_hash=images.data_hash,
    )  # fmt: skip


def masked(folder: Path, device: str) -> Masked:
    plain = text(device, context=128, batch=64, steps=1000)
    return Masked(**vars(plain))


def spans(folder: Path, device: str) -> Spans:
    plain = text(device, context=128, batch=64, steps=1000)
    return Spans(**vars(plain))


UNSEEN_TASKS: dict[str, Load] = {
    "masked bytes": masked,
    "spans of bytes": spans,
    "cora": cora,
    "adult": adult,
    "cart-pole": lambda folder, device: CartPole(device),
    "cifar autoencoding": autoencoding,
}
"""Beside those of ``tasks.TASKS``; each is made by ``load(folder of data, device)``."""
