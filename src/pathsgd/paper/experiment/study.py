"""The whole study as data: which runs there are, and in which phases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pathsgd.console.options import option
from pathsgd.errors import PathError
from pathsgd.paper.data.dataset import called
from pathsgd.paper.experiment.config import Init, Net, Run, Seeds
from pathsgd.paper.experiment.methods import METHODS, method

ALL_STEP_SIZES = tuple(10.0**-a for a in range(11))


@dataclass(frozen=True)
class Cell:
    """What one step size is chosen for."""

    dataset: str
    dropout: float
    init: Init
    method: str


@dataclass(frozen=True)
class Study:
    """What is compared, at what size."""

    datasets: tuple[str, ...] = option(
        ("digits",), "any of digits, mnist, cifar10, cifar100, svhn, name=path.npz"
    )
    methods: tuple[str, ...] = option(("sgd", "adagrad", "path-sgd"), f"any of {', '.join(METHODS)}")
    inits: tuple[Init, ...] = option(
        ("balanced", "unbalanced"), "initialisations: balanced, unbalanced, powers-of-two"
    )
    dropouts: tuple[float, ...] = option((0.0, 0.5), "probabilities with which hidden units are dropped")
    step_sizes: tuple[float, ...] = option(ALL_STEP_SIZES, "step sizes to choose from")
    net: Net = option("mlp", "linear layers, or convolutions with pooling and one linear hidden layer")
    hidden: tuple[int, ...] = option((4000, 4000), "hidden units of each layer (conv: channels, then units)")
    batch: int = option(100, "points in a mini-batch")
    search_epochs: int = option(20, "epochs of the runs that choose a step size")
    epochs: int = option(100, "epochs of the final runs")
    validation: int = option(10_000, "training points kept out for choosing a step size")
    repeats: int = option(1, "final runs of each kind, with other seeds each time")
    p: float = option(2.0, "order of the path norm")
    centre: bool = option(True, "subtract the training mean from every input feature")
    tf32: bool = option(False, "let products and convolutions on a GPU round their inputs to tf32")
    early_stop: bool = option(
        True,
        "stop a search run whose validation error after a third of its epochs is not below 90% of guessing; "
        "it is carried on unless the best of the others is below half of guessing",
    )
    seed: int = option(0, "of everything: initial weights, split, order, dropout, rescaling")

    def __post_init__(self) -> None:
        for name in self.methods:
            method(name)
        for name in ("datasets", "methods", "inits", "dropouts", "step_sizes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise PathError(f"--{name.replace('_', '-')}: expected at least one, each once")
        names = list(map(called, self.datasets))
        if len(set(names)) < len(names):
            raise PathError(f"--datasets: {', '.join(names)}: each needs a name of its own")
        if self.repeats < 1:
            raise PathError(f"Invalid number of repeats: {self.repeats} (at least 1)")
        if not self.validation:
            raise PathError("a study needs validation points to choose step sizes: --validation")
        list(self.searches(dict.fromkeys(self.datasets, "")))  # a wrong number is found now, not later

    def cells(self) -> list[Cell]:
        """Everything a step size is chosen for."""
        return [
            Cell(*values)
            for values in itertools.product(self.datasets, self.dropouts, self.inits, self.methods)
        ]

    def run(self, cell: Cell, data: str, step_size: float) -> Run:
        """What all runs of a cell have in common."""
        return Run(
            dataset=cell.dataset, method=cell.method, step_size=step_size, init=cell.init,
            dropout=cell.dropout, net=self.net, hidden=self.hidden, batch=self.batch, p=self.p,
            centre=self.centre, tf32=self.tf32, seed=self.seeds(0), data=data, epochs=self.epochs,
        )  # fmt: skip

    def searches(self, checksums: dict[str, str]) -> Iterator[Run]:
        """The runs that choose step sizes. ``checksums`` are those of the data sets."""
        for cell in self.cells():
            yield from self.searches_of(cell, checksums[cell.dataset])

    def searches_of(self, cell: Cell, data: str) -> list[Run]:
        grace = max(self.search_epochs // 3, 1) if self.early_stop else 0
        return [
            replace(
                self.run(cell, data, size), epochs=self.search_epochs, validation=self.validation, grace=grace
            )
            for size in self.step_sizes
        ]

    def finals_of(self, cell: Cell, data: str, step_size: float) -> list[Run]:
        """Runs on all the training data."""
        run = self.run(cell, data, step_size)
        return [replace(run, seed=self.seeds(k)) for k in range(self.repeats)]

    def exact_of(self, cell: Cell, data: str, step_size: float) -> Run:
        """The first final run once more, from weights rescaled by powers of two: nothing is rounded."""
        return replace(self.run(cell, data, step_size), init="powers-of-two")

    def seeds(self, repeat: int) -> Seeds:
        seed = self.seed + repeat
        return Seeds(init=seed, split=self.seed, order=seed, dropout=seed, rescaling=seed)


PRESETS = {
    "small": Study(
        hidden=(256, 256), search_epochs=20, epochs=40, validation=300, repeats=3,
        step_sizes=ALL_STEP_SIZES[:7],
    ),
    "paper": Study(datasets=("mnist", "cifar10", "cifar100", "svhn")),
}  # fmt: skip


def carried_on(runs: Sequence[Run]) -> list[Run]:
    """The same without a grace."""
    return [replace(run, grace=0) for run in runs]
