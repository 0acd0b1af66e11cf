"""One run of a comparison: its batches, its loss, its schedule, and how long a step takes."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from pathsgd._torch import tree_leaves, tree_map
from pathsgd.errors import PathError
from pathsgd.graph.trace import Inputs

Loss = Callable[[nn.Module, Any], Tensor]
POINTS, WARM_UP = 20, 0.05
"""Points of a curve, and the part of a run in which the rate rises."""
UNTIMED = 3
"""Steps at the start of a run that are not timed: the first ones trace and allocate."""
ADVICE = "give a loss, a function of the model and a batch, as the fourth argument"


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of what most batches are: see :func:`pathsgd.compare`."""
    if isinstance(batch, Mapping):
        loss = getattr(model(**batch), "loss", None)
        if loss is None:
            raise PathError(
                f"the model returned no loss of a batch with {', '.join(batch)}: are labels missing? "
                f"Or {ADVICE}"
            )
        return loss
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise PathError(f"a batch is a {type(batch).__name__}, not a dict or a pair x, y: {ADVICE}")
    x, y = batch
    outputs = model(x)
    outputs = getattr(outputs, "logits", outputs)  # of transformers
    if not isinstance(outputs, Tensor):
        raise PathError(f"the model returned a {type(outputs).__name__}, not a tensor: {ADVICE}")
    if y.is_floating_point():
        if outputs.shape != y.shape:
            raise PathError(
                f"the model returned {tuple(outputs.shape)} where y is {tuple(y.shape)}: make them alike, or "
                f"{ADVICE}"
            )
        return F.mse_loss(outputs, y)
    if outputs.shape[:-1] == y.shape:  # classes last, as those of language models
        outputs, y = outputs.flatten(0, -2), y.flatten()
    return F.cross_entropy(outputs, y)


def cycle(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches again and again, on the model's device."""
    while True:
        count = 0
        for count, batch in enumerate(batches, 1):  # noqa: B007
            yield _move(batch, device)
        if not count:
            raise PathError("there are no batches")


def _move(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        batch = dict(batch)  # as transformers' BatchEncoding, which tree_map does not know
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


@torch.no_grad()
def record_inputs(model: nn.Module, batch: Any, loss: Loss) -> Inputs:
    """What the loss calls the model with. A copy is run, since a forward may change buffers."""
    model, calls = copy.deepcopy(model), []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        loss(model, batch)
    except PathError:
        raise
    except Exception as error:
        sizes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        names = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        raise PathError(
            f"the loss of the first batch, a {type(batch).__name__}{names} with tensors of {sizes}, raised "
            f"{type(error).__name__}: {str(error).strip()}" + (f"; {ADVICE}" if loss is default_loss else "")
        ) from error
    if not calls:
        raise PathError("the loss does not call the model itself, so what it is called with is not known")
    return Inputs(*calls[0])


@dataclass
class Trainer:
    """One run."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    steps: int
    bar: Progress
    times: list[float] = field(default_factory=list)
    """Seconds of a step, each the mean between two points of the curve."""

    @property
    def seconds(self) -> float:
        """Of a step: the median, as other programs on the machine slow some of them."""
        return median(self.times) if self.times else math.nan

    def train(
        self, batches: Iterator[Any], valid: Iterable[Any] | None, device: torch.device
    ) -> Iterator[tuple[int, float]]:
        """Yields points of the curve."""
        warm_up = max(1, round(WARM_UP * self.steps))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda t: min((t + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * min(1.0, t / self.steps))),
        )
        ends = sorted({round(self.steps * k / POINTS) for k in range(1, POINTS + 1)} - {0})
        losses: list[Tensor] = []
        since, start = UNTIMED, time.perf_counter()
        if valid is not None:
            yield 0, self._measure(valid, device)
        self.model.train()
        for step in range(1, self.steps + 1):
            losses.append(self._step(next(batches)))
            schedule.step()
            self.bar.advance()
            if step == UNTIMED:
                start = _now(device)
            if step in ends:
                if step > since:
                    self.times.append((_now(device) - start) / (step - since))
                value = float(torch.stack(losses).mean()) if valid is None else self._measure(valid, device)
                losses.clear()
                yield step, value if math.isfinite(value) else math.inf
                if not math.isfinite(value):
                    self.bar.advance(self.steps - step)
                    break
                since, start = max(step, UNTIMED), time.perf_counter()

    def _step(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def _measure(self, valid: Iterable[Any], device: torch.device) -> float:
        self.model.eval()
        losses = [self.loss(self.model, _move(batch, device)) for batch in valid]
        self.model.train()
        if not losses:
            raise PathError("there are no batches to validate on: pass None without any")
        return fmean(map(float, losses))


class Progress:
    """Says on stderr how far a comparison is: a bar that is renewed a few times a second, or where stderr is
    no terminal a line for each run."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self.total, self.is_shown, self.done = total, is_shown, 0
        self.is_bar = is_shown and sys.stderr.isatty()
        self.start = self.shown = time.perf_counter()

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        now = time.perf_counter()
        if self.is_bar and now > self.shown + 0.2:
            self.shown = now
            bar = "#" * (30 * self.done // self.total)
            self._write(f"\r[{bar:30}] {self._describe(now)} ")

    def end_run(self, name: str) -> None:
        if self.is_shown and not self.is_bar:
            self._write(f"{name}: {self._describe(time.perf_counter())}\n")

    def close(self) -> None:
        if self.is_bar:
            self._write(f"\r{'':79}\r")

    def _describe(self, now: float) -> str:
        left = (now - self.start) * (self.total / max(1, self.done) - 1)
        return f"{self.done} of {self.total} steps, {left:.0f} s left"

    def _write(self, text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
