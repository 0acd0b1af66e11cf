"""Text with parts taken out, which a model puts back: as BERT and as T5 are trained."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .tasks import Batch, Part, Text

MASK = 256
"""The token that stands for a masked byte."""
SPECIAL = 3
"""As in ByT5, 0 pads, 1 ends a text and 2 is unknown; the bytes follow, and the marks of spans come last."""
SPANS = 6
SPAN_TOKENS = SPECIAL + 256 + SPANS


@dataclass(frozen=True)
class Corrupted(Text):
    """Pieces of text, changed at random; held-out ones always in the same way."""

    @abstractmethod
    def corrupt(self, clean: Tensor, generator: torch.Generator) -> Batch:
        """What the model reads, and at the end what it is to answer; -100 where nothing is asked."""

    def batches(self, model: nn.Module, generator: torch.Generator, steps: int) -> Iterator[Batch]:
        for clean, _ in super().batches(model, generator, steps):
            yield self.corrupt(clean, generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        *inputs, answer = batch
        return F.cross_entropy(model(*inputs).flatten(0, 1), answer.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        text = self.parts[part]
        generator = torch.Generator(text.device).manual_seed(0)
        starts = torch.linspace(0, len(text) - self.context - 1, self.pieces, device=text.device).long()
        losses = [
            self.loss(model, self.corrupt(self._cut(part, some)[0], generator)) for some in starts.split(64)
        ]
        return {"loss": torch.stack(losses).mean().item()}


@dataclass(frozen=True)
class Masked(Corrupted):
    """As BERT: of the 15% of bytes that are asked for, 80% are masked, 10% another and 10% as they were."""

    def corrupt(self, clean: Tensor, generator: torch.Generator) -> Batch:
        asked, how = torch.rand((2, *clean.shape), generator=generator, device=clean.device)
        other = torch.randint(256, clean.shape, generator=generator, device=clean.device)
        read = torch.where(how < 0.8, MASK, torch.where(how < 0.9, other, clean))
        return torch.where(asked < 0.15, read, clean), torch.where(asked < 0.15, clean, -100)


@dataclass(frozen=True)
class Spans(Corrupted):
    """As T5: 15% of the bytes are left out, in spans of three on average, each marked by a token of its own;
    the answer is those marks, each before the bytes of its span. Every piece begins with a kept span and ends
    with one left out, so all are of one length."""

    @property
    def example(self) -> Batch:  # type: ignore[override]
        kept, device = super().example, self.parts["train"].device
        gone = round(0.15 * self.context)
        read = torch.zeros(1, kept.shape[1] - gone + SPANS + 1, dtype=torch.long, device=device)
        return read, read[:, : gone + SPANS + 1]

    def corrupt(self, clean: Tensor, generator: torch.Generator) -> Batch:
        gone = round(0.15 * self.context)
        lengths = torch.stack(
            [_lengths(len(clean), total, generator) for total in (self.context - gone, gone)], dim=2
        )
        ends = lengths.flatten(1).cumsum(1)
        places = torch.arange(self.context, device=clean.device)
        span = (places[:, None] >= ends[:, None, :]).sum(2)  # 0 is kept, 1 left out, 2 kept...
        left_out = span % 2 == 1
        read = _with_marks(clean + SPECIAL, left_out, span // 2, self.context - gone)
        answer = _with_marks(clean + SPECIAL, ~left_out, span // 2, gone)
        return read, F.pad(answer[:, :-1], (1, 0)), answer


def _lengths(count: int, total: int, generator: torch.Generator) -> Tensor:
    """How long each of SPANS spans is, uniformly among the ways to divide ``total``."""
    device = generator.device
    cuts = torch.rand(count, total - 1, generator=generator, device=device).argsort(1)[:, : SPANS - 1] + 1
    return F.pad(F.pad(cuts.sort(1).values, (1, 0)), (0, 1), value=total).diff(dim=1)


def _with_marks(tokens: Tensor, replaced: Tensor, number: Tensor, kept: int) -> Tensor:
    """Each span that is replaced becomes one mark, that of its number; then the token that ends a text."""
    first = replaced & ~F.pad(replaced[:, :-1], (1, 0))
    tokens = torch.where(first, SPECIAL + 256 + number, tokens)
    stay = (~replaced | first).byte().argsort(dim=1, descending=True, stable=True)[:, : kept + SPANS]
    return F.pad(tokens.gather(1, stay), (0, 1), value=1)
