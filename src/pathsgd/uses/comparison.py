"""compare: the same model trained by several optimizers, from its start and from a rescaled copy of it."""

from __future__ import annotations

import copy
import io
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from pathsgd._torch import tree_map
from pathsgd.balancing.balance import balance
from pathsgd.balancing.rescale import unbalance
from pathsgd.errors import PathError
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Inputs, trace
from pathsgd.muon.balanced_muon import BalancedMuon

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Loss = Callable[[nn.Module, Any], Tensor]
Make = Callable[[nn.Module, PathGraph, Any], Optimizer]
POINTS, WARM_UP = 20, 0.05
"""Points of a curve, and the part of a run in which the rate rises."""
MORE_RATES = 3
"""The most that are tried beyond those given."""
UNTIMED = 3
"""Steps at the start of a run that are not timed: the first ones trace and allocate."""


def _make_balanced_adamw(model: nn.Module, graph: PathGraph, rate: float) -> Optimizer:
    balance(model, graph)
    return torch.optim.AdamW(model.parameters(), rate)


@dataclass(frozen=True)
class TrainingRun:
    """A run of a :class:`Comparison`.

    Attributes:
        method: its name.
        rate: None is the optimizer's default.
        rescaled: whether it began from the rescaled copy.
        curve: steps and losses. Once a loss is not finite it is inf, and the run ends.
        seconds: of a step, evaluation and the first steps left out.
    """

    method: str
    rate: float | None
    rescaled: bool
    curve: tuple[tuple[int, float], ...]
    seconds: float

    @property
    def loss(self) -> float:
        """At the end of training."""
        return self.curve[-1][1]


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of :func:`pathsgd.compare`: ``print`` shows its table, a notebook its figure.

    Attributes:
        title: the model's class and the number of steps.
        metric: ``"validation loss"``, or ``"training loss"`` where no validation data was given.
        runs: one for each method, rate and start, the best rate of a method first.

    Example:
        >>> slow, fast = (
        ...     TrainingRun("SGD", lr, False, ((1, loss),), 0.0) for lr, loss in ((0.1, 2.0), (1, 1.0))
        ... )
        >>> Comparison("Linear, 1 step", "training loss", (fast, slow)).find("SGD").rate
        1
    """

    title: str
    metric: str
    runs: tuple[TrainingRun, ...]

    def find(self, method: str, rescaled: bool = False) -> TrainingRun:
        """Finds the run at the best rate.

        Args:
            method: its name.
            rescaled: from the rescaled copy.

        Returns:
            The run.
        """
        return next(run for run in self.runs if (run.method, run.rescaled) == (method, rescaled))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(run.method for run in self.runs))

    @property
    def has_rescaled(self) -> bool:
        return any(run.rescaled for run in self.runs)

    def __str__(self) -> str:
        rescaled = {(run.method, run.rate): run.loss for run in self.runs if run.rescaled}
        width = max(map(len, self.methods))
        lines = [f"{self.title}, {self.metric}", f"{'':{width}}     rate      loss  ms a step"]
        lines[1] += "  rescaled" * self.has_rescaled
        for run in self.runs:
            if not run.rescaled:
                rate = "default" if run.rate is None else f"{run.rate:g}"
                time = "-" if math.isnan(run.seconds) else f"{1000 * run.seconds:.3g}"
                cells = f"{rate:>9} {run.loss:>9.4g} {time:>10}"
                other = rescaled.get((run.method, run.rate))
                cells += "" if other is None else f" {other:>9.4g}"
                lines.append(f"{run.method:{width}}{cells}")
        lines += [
            f"{method}: the best rate is at an end of those tried, so try others (lr)"
            for method in self.methods
            if self._ends(method)
        ]
        return "\n".join(lines)

    def _ends(self, method: str) -> bool:
        return (
            find_rate_beyond([run for run in self.runs if run.method == method and not run.rescaled])
            is not None
        )

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.methods)}: {self.title}>"

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.draw().savefig(buffer, format="png")
        return buffer.getvalue()

    def draw(self) -> Figure:
        """Draws a curve for each method at its best rate; with runs from the rescaled copy, a panel for each.

        Returns:
            A Figure of matplotlib, without pyplot: ``draw().savefig("comparison.png")``.

        Raises:
            PathError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import LogLocator, NullFormatter
        except ImportError as error:
            raise PathError("the figure needs matplotlib: pip install matplotlib") from error
        count = len(self.methods) if self.has_rescaled else 1
        columns = 3 if count in (5, 6) else min(count, 4)
        rows = math.ceil(count / columns)
        size = (2.75 * columns, 2.4 * rows + 0.4) if count > 1 else (6.5, 4)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
        for panel, method in zip(
            panels * (1 if count > 1 else len(self.methods)), self.methods, strict=False
        ):
            self._draw_method(panel, method)
        low, high = self._limits()
        panels[0].set_yscale("log")
        for panel in panels:
            panel.spines[["top", "right"]].set_visible(False)
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("{x:g}" if high < 5 * low else NullFormatter())
        for panel in panels[count:]:
            panel.set_visible(False)
        panels[0].set_ylim(low, high)
        panels[0].legend(frameon=False, fontsize=9)
        figure.suptitle(f"{self.title}: {self.metric}", fontsize=11)
        return figure

    def _draw_method(self, axes: Axes, method: str) -> None:
        run = self.find(method)
        label = method + ("" if run.rate is None else f", {run.rate:g}")
        if not self.has_rescaled:
            axes.plot(*zip(*run.curve, strict=True), label=label)
            return
        axes.set_title(label, fontsize=10)
        axes.plot(*zip(*run.curve, strict=True), color="#5b9bd5", linewidth=4, alpha=0.6, label="as made")
        curve = [point for point in self.find(method, rescaled=True).curve if point[1] < math.inf]
        if curve:
            axes.plot(*zip(*curve, strict=True), color="#a61c1c", linewidth=1.4, label="rescaled copy")
        if curve[-1:] != list(self.find(method, rescaled=True).curve[-1:]):
            axes.annotate("diverges", (0.97, 0.9), xycoords="axes fraction", ha="right", color="#a61c1c")

    def _limits(self) -> tuple[float, float]:
        """What the best rates reach, and of other curves no more than twice where training begins."""
        curves = [self.find(method).curve for method in self.methods]
        losses = [loss for curve in curves for _, loss in curve if 0 < loss < math.inf] or [1.0]
        return 0.8 * min(losses), 1.2 * min(max(losses), 2 * max(curve[0][1] for curve in curves))


def compare(
    model: nn.Module,
    batches: Iterable[Any],
    valid: Iterable[Any] | None = None,
    loss: Loss | None = None,
    *,
    lr: Sequence[float] = (3e-4, 1e-3, 3e-3),
    methods: Mapping[str, tuple[Make, Sequence[float | None]]] | None = None,
    steps: int = 200,
    rescaled: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> Comparison:
    """Trains copies of a model by several optimizers: the same start, the same batches, the same schedule.

    By default AdamW at three rates or more, AdamW on the balanced model likewise, and
    :class:`~pathsgd.BalancedMuon` at its default. All with 5% warm-up and a cosine to zero. The model is not
    changed.

    Args:
        model: at its start, on the device it is to be trained on.
        batches: a DataLoader, or what else can be gone through again and again.
        valid: batches to measure on, twenty times in a run; without, the loss in training is shown.
        loss: computes the loss from the model and a batch. By default ``model(**batch).loss`` of a batch that
            is a dict, and of a pair ``x, y`` the cross-entropy between ``model(x)`` and y where y holds
            integers, the mean squared error where it does not.
        lr: the rates of AdamW. Where the best is at an end, up to three more are tried beyond it.
        methods: others than these, by name: a function that makes the optimizer, called with a model, its
            graph and a rate, and the rates that are tried first; a rate of None is shown as the default.
        steps: of each run.
        rescaled: also train a copy whose units are rescaled at random, each method at its best rate.
        seed: of the order of the batches, dropout and the random rescaling.
        progress: shows a bar on stderr.

    Returns:
        A :class:`Comparison`, which can draw itself.

    Raises:
        TraceError: the model cannot be traced.
        PathError: there are no batches, or there is no default loss for them.

    Example:
        >>> import pathsgd
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        >>> batches = [(x, (x[:, 0] > 0).long())]
        >>> result = pathsgd.compare(model, batches, batches, steps=20)
        >>> result.methods
        ['AdamW', 'balance + AdamW', 'BalancedMuon']
        >>> [step for step, loss in result.find("BalancedMuon").curve][:3]
        [0, 1, 2]
    """
    if callable(valid):
        raise PathError("valid is a function: without batches to validate on, pass None, then the loss")
    loss = loss or default_loss
    if methods is None:
        methods = {
            "AdamW": (lambda model, graph, rate: torch.optim.AdamW(model.parameters(), rate), lr),
            "balance + AdamW": (_make_balanced_adamw, lr),
            "BalancedMuon": (lambda model, graph, rate: BalancedMuon(model, graph), (None,)),
        }
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    graph = trace(model, _record_inputs(model, next(_cycle(batches, device)), loss))
    starts = [copy.deepcopy(model)]
    if rescaled:
        starts.append(copy.deepcopy(model))
        unbalance(starts[1], graph, generator=torch.Generator().manual_seed(seed))
    rates = sum(len(rates) for _, rates in methods.values())
    bar, runs = _Bar(steps * (rates + len(methods) * (len(starts) - 1)), progress), []

    def run(name: str, make: Make, rate: float | None, is_rescaled: bool = False) -> TrainingRun:
        trained = copy.deepcopy(starts[is_rescaled])
        optimizer = make(trained, graph, rate)
        trainer = _Trainer(trained, optimizer, loss, steps, bar)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            curve = tuple(trainer.train(_cycle(batches, device), valid, device))
        return TrainingRun(name, rate, is_rescaled, curve, trainer.seconds)

    for name, (make, tried) in methods.items():
        found = [run(name, make, rate) for rate in tried]
        for _ in range(MORE_RATES):
            if (rate := find_rate_beyond(found)) is None:
                break
            bar.total += steps
            found.append(run(name, make, rate))
        found.sort(key=lambda run: run.loss)
        runs += found
        if rescaled:
            runs.append(run(name, make, found[0].rate, is_rescaled=True))
    bar.close()
    metric = "training loss" if valid is None else "validation loss"
    return Comparison(f"{type(model).__name__}, {steps} steps", metric, tuple(runs))


def find_rate_beyond(runs: Sequence[TrainingRun]) -> float | None:
    """The next rate if the best is the smallest or the largest of several."""
    losses = {run.rate: run.loss for run in runs if run.rate is not None}
    rates = sorted(losses)
    best = min(rates, key=lambda rate: losses[rate], default=None)
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    inner = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / inner:.2g}")


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of what most batches are: see :func:`compare`."""
    advice = "give a loss, a function of the model and a batch, as the fourth argument"
    if isinstance(batch, Mapping):
        loss = getattr(model(**batch), "loss", None)
        if loss is None:
            raise PathError(
                f"the model returned no loss of a batch with {', '.join(batch)}: are labels missing? "
                f"Or {advice}"
            )
        return loss
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise PathError(f"a batch is a {type(batch).__name__}, not a dict or a pair x, y: {advice}")
    x, y = batch
    outputs = model(x)
    outputs = getattr(outputs, "logits", outputs)  # of transformers
    if not isinstance(outputs, Tensor):
        raise PathError(f"the model returned a {type(outputs).__name__}, not a tensor: {advice}")
    if y.is_floating_point():
        return F.mse_loss(outputs, y)
    if outputs.shape[:-1] == y.shape:  # classes last, as those of language models
        outputs, y = outputs.flatten(0, -2), y.flatten()
    return F.cross_entropy(outputs, y)


def _cycle(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches again and again, on the model's device."""
    while True:
        count = 0
        for count, batch in enumerate(batches, 1):  # noqa: B007
            yield _move(batch, device)
        if not count:
            raise PathError("there are no batches, or they can be gone through only once: give a DataLoader "
                            "or a list")  # fmt: skip


def _move(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        batch = dict(batch)  # as transformers' BatchEncoding, which tree_map does not know
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


@torch.no_grad()
def _record_inputs(model: nn.Module, batch: Any, loss: Loss) -> Inputs:
    """What the loss calls the model with. A copy is run, since a forward may change buffers."""
    model, calls = copy.deepcopy(model), []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    loss(model, batch)
    if not calls:
        raise PathError("the loss does not call the model itself, so what it is called with is not known")
    return Inputs(*calls[0])


@dataclass
class _Trainer:
    """One run. ``seconds`` is known at its end."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    steps: int
    bar: _Bar
    seconds: float = math.nan

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
        timed, spent, start = 0, 0.0, time.perf_counter()
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
                timed, spent = max(0, step - UNTIMED), spent + (_now(device) - start) * (step > UNTIMED)
                value = float(torch.stack(losses).mean()) if valid is None else self._measure(valid, device)
                losses.clear()
                yield step, value if math.isfinite(value) else math.inf
                if not math.isfinite(value):
                    self.bar.advance(self.steps - step)
                    break
                start = time.perf_counter()
        self.seconds = spent / timed if timed else math.nan

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
        return fmean(map(float, losses)) if losses else math.nan


class _Bar:
    """A line on stderr that says how far a comparison is, renewed a few times a second."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self.total, self.is_shown, self.done = total, is_shown, 0
        self.start = self.shown = time.perf_counter()

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        now = time.perf_counter()
        if self.is_shown and now > self.shown + 0.2:
            self.shown = now
            left = (now - self.start) * (self.total / self.done - 1)
            bar = "#" * (30 * self.done // self.total)
            print(
                f"\r[{bar:30}] {self.done} of {self.total} steps, {left:.0f} s left ", end="", file=sys.stderr
            )

    def close(self) -> None:
        if self.is_shown:
            print(f"\r{'':79}\r", end="", file=sys.stderr)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
