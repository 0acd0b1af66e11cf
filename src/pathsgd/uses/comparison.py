"""compare: the same model trained by several optimizers, from its start and from a rescaled copy of it."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from pathsgd.balancing.balance import balance
from pathsgd.balancing.imbalance import imbalance
from pathsgd.balancing.rescale import unbalance
from pathsgd.errors import PathError
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import trace
from pathsgd.graph.unit_classes import unit_classes_of
from pathsgd.muon.balanced_muon import BalancedMuon
from pathsgd.uses.short_training import Loss, Progress, Trainer, cycle, default_loss, record_inputs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Make = Callable[[nn.Module, PathGraph, Any], Optimizer]
MORE_RATES = 3
"""The most that are tried beyond those given."""


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
        note: how far the start is from balance.

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
    note: str = ""

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
            if find_rate_beyond([run for run in self.runs if run.method == method and not run.rescaled])
        ]
        lines += [self.note] * bool(self.note)
        lines.append("One seed: small differences are chance. Times depend on what else runs on the machine.")
        return "\n".join(lines)

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
        figure.supxlabel("steps", fontsize=10)
        return figure

    def _draw_method(self, axes: Axes, method: str) -> None:
        run = self.find(method)
        title = label(method, run.rate)
        if not self.has_rescaled:
            # Curves may lie on each other: the first ones are wide.
            width = 1.5 * (len(self.methods) - self.methods.index(method))
            axes.plot(*zip(*run.curve, strict=True), label=title, linewidth=width, alpha=0.7)
            return
        axes.set_title(title, fontsize=10)
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
        rescaled: also train a copy whose units are rescaled at random, by powers of two, so that no weight is
            rounded; each method at its best rate.
        seed: of the order of the batches, dropout and the random rescaling.
        progress: shows a bar on stderr, or where that is no terminal a line for each run.

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
    for given in (batches, valid):
        if isinstance(given, Iterator):
            raise PathError("batches can be gone through only once: give a DataLoader or a list")
    if not all(0 < rate < math.inf for rate in lr):
        raise PathError(f"rates have to be above 0 and finite, not {', '.join(map(str, lr))}")
    loss = loss or default_loss
    if methods is None:
        methods = {
            "AdamW": (lambda model, graph, rate: torch.optim.AdamW(model.parameters(), rate), lr),
            "balance + AdamW": (_make_balanced_adamw, lr),
            "BalancedMuon": (lambda model, graph, rate: BalancedMuon(model, graph), (None,)),
        }
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    graph = trace(model, record_inputs(model, next(cycle(batches, device)), loss))
    starts = [copy.deepcopy(model)]
    if rescaled:
        starts.append(copy.deepcopy(model))
        generator = torch.Generator().manual_seed(seed)
        unbalance(starts[1], graph, generator=generator, powers_of_two=True)
    rates = sum(len(rates) for _, rates in methods.values())
    bar, runs = Progress(steps * (rates + len(methods) * (len(starts) - 1)), progress), []

    def run(name: str, make: Make, rate: float | None, is_rescaled: bool = False) -> TrainingRun:
        trained = copy.deepcopy(starts[is_rescaled])
        optimizer = make(trained, graph, rate)
        trainer = Trainer(trained, optimizer, loss, steps, bar)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            curve = tuple(trainer.train(cycle(batches, device), valid, device))
        bar.end_run(label(name, rate) + (", rescaled" if is_rescaled else ""))
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
    return Comparison(f"{type(model).__name__}, {steps} steps", metric, tuple(runs), _describe(starts, graph))


def _describe(starts: Sequence[nn.Module], graph: PathGraph) -> str:
    """How far the starts are from balance."""
    if unit_classes_of(graph).count == 1:
        return "no unit of this model can be rescaled, so balance changes nothing"
    whose = ("the start", "the rescaled copy")
    ratios = [imbalance(start, graph).ratio or math.nan for start in starts]  # nan of a network of zeros
    texts = [f"of {name} {ratio:#.3g}" for name, ratio in zip(whose, ratios, strict=False)]
    return f"mu_{{2,2}} over that of the balanced network: {', '.join(texts)}"


def label(method: str, rate: float | None) -> str:
    """How a run is called."""
    return method + ("" if rate is None else f", {rate:g}")


def find_rate_beyond(runs: Sequence[TrainingRun]) -> float | None:
    """The next rate if the best is the smallest or the largest of several."""
    losses = {run.rate: run.loss for run in runs if run.rate is not None}
    rates = sorted(losses)
    best = min(rates, key=lambda rate: losses[rate], default=None)
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    inner = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / inner:.2g}")
