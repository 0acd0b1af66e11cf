"""Configurations; the comment or string at a field is the help of its option on the command line."""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Suppress, arg

from pathsgd import PathError
from study.data import short_name
from study.methods import find_method

Init = Literal["balanced", "unbalanced", "powers-of-two"]
ALL_STEP_SIZES = tuple(10.0**-a for a in range(11))


@dataclass(frozen=True)
class Seeds:
    """One seed for each thing that is drawn, so that one can be changed and the others held."""

    init: Annotated[int, arg(name="seed-init")] = 0  # seed of the balanced weights
    split: Annotated[int, arg(name="seed-split")] = 0  # seed of the points kept out for validation
    order: Annotated[int, arg(name="seed-order")] = 0  # seed of the order of the training points
    dropout: Annotated[int, arg(name="seed-dropout")] = 0  # seed of the units dropped
    rescaling: Annotated[int, arg(name="seed-rescaling")] = 0  # seed of the rescaling that unbalances


@dataclass(frozen=True)
class Run:
    """One training run: everything its numbers depend on.

    >>> Run(method="sgd", step_size=0.1).name
    'digits-sgd-balanced-0.1-test-18749d9b7ce3'
    """

    dataset: str = "digits"  # digits, mnist, cifar10, cifar100, svhn, or name=path.npz
    method: str = "path-sgd"
    """sgd, momentum, adagrad, adam, adamw, path-sgd, path-momentum, path-adagrad, path-adam, path-adamw"""
    step_size: Annotated[float, arg(aliases=("--lr",))] = 1e-2  # the learning rate
    init: Init = "balanced"
    """N(0, 1/fan_in); or the same unbalanced, a quarter of the hidden units rescaled by 10 c with c
    log-normal; or by the power of two nearest to that"""
    dropout: float = 0.0  # probability with which a hidden unit is dropped
    net: Suppress[str] = "mlp"  # linear layers with ReLU between them
    hidden: tuple[int, ...] = (256, 256)  # hidden units of each layer
    batch: int = 100  # points in a mini-batch; an epoch leaves out what does not fill one
    epochs: int = 20  # epochs
    validation: int = 0
    """training points kept out and evaluated on; 0 trains on all and evaluates on the test set"""
    p: float = 2.0  # order of the path norm
    centre: bool = True  # subtract the training mean from every input feature
    tf32: bool = False  # let matrix products on a GPU round their inputs to tf32
    grace: int = 0  # stop after this many epochs if the error is then not below 90% of guessing (0: never)
    seed: Annotated[Seeds, arg(name="")] = field(default_factory=Seeds)  # seeds of everything that is drawn
    data: Suppress[str] = ""
    """checksum of the data, filled in when the run is started: other data is another run"""

    def __post_init__(self) -> None:
        find_method(self.method)
        for name in ("step_size", "dropout", "p"):  # 1 and 1.0 are one configuration
            object.__setattr__(self, name, float(getattr(self, name)))
        sound = {
            "net": self.net == "mlp",
            "step_size": 0 < self.step_size < 1e38,
            "dropout": 0 <= self.dropout < 1,
            "hidden": min(self.hidden, default=0) > 0,
            "batch": self.batch > 0,
            "epochs": self.epochs > 0,
            "validation": self.validation >= 0,
            "p": 1 <= self.p < math.inf,
            "grace": self.grace >= 0,
            "seed": all(0 <= seed < 1 << 63 for seed in vars(self.seed).values()),
        }
        for name, holds in sound.items():
            if not holds:
                raise PathError(f"Invalid {name.replace('_', ' ')}: {getattr(self, name)}")

    @property
    def evaluates_on(self) -> str:
        return "validation" if self.validation else "test"

    @property
    def name(self) -> str:
        """Name of the run's folder: readable, and different for each configuration.

        Leave a new field out of the digest while it is at its default, or recorded runs are not found.
        """
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        data = re.sub(r"[^A-Za-z0-9_.-]", "_", short_name(self.dataset))[:32]
        dropout = f"-dropout{self.dropout:g}" if self.dropout else ""
        return f"{data}-{self.method}-{self.init}{dropout}-{self.step_size:g}-{self.evaluates_on}-{digest}"


@dataclass(frozen=True)
class Cell:
    """One combination of the fields of a :class:`Run` that a step size is chosen for."""

    dataset: str
    dropout: float
    init: Init
    method: str


@dataclass(frozen=True)
class Study:
    """A comparison of methods at one size. The defaults are the paper's."""

    datasets: Annotated[tuple[str, ...], arg(aliases=("--dataset",))] = ("digits",)
    """any of digits, mnist, cifar10, cifar100, svhn, name=path.npz"""
    methods: Annotated[tuple[str, ...], arg(aliases=("--method",))] = ("sgd", "adagrad", "path-sgd")
    """sgd, momentum, adagrad, adam, adamw, path-sgd, path-momentum, path-adagrad, path-adam, path-adamw"""
    inits: Annotated[tuple[Init, ...], arg(aliases=("--init",))] = ("balanced", "unbalanced")
    """initialisations: balanced, unbalanced, powers-of-two"""
    dropouts: Annotated[tuple[float, ...], arg(aliases=("--dropout",))] = (0.0, 0.5)
    """probabilities with which hidden units are dropped"""
    step_sizes: Annotated[tuple[float, ...], arg(aliases=("--step-size", "--lr"))] = ALL_STEP_SIZES
    """step sizes to choose from"""
    net: Suppress[str] = "mlp"  # linear layers with ReLU between them
    hidden: tuple[int, ...] = (4000, 4000)  # hidden units of each layer
    batch: int = 100  # points in a mini-batch
    search_epochs: int = 20  # epochs of the runs that choose a step size
    epochs: int = 100  # epochs of the final runs
    validation: int = 10_000  # training points kept out for choosing a step size
    repeats: int = 1  # final runs of each kind, with other seeds each time
    more_repeats: int = 0
    """further final runs of those of which a verdict cannot be told and hangs on the number of seeds"""
    p: float = 2.0  # order of the path norm
    centre: bool = True  # subtract the training mean from every input feature
    tf32: bool = False  # let matrix products on a GPU round their inputs to tf32
    early_stop: bool = True
    """stop a search run whose validation error after a third of its epochs is not below 90% of guessing; it
    is trained to the end unless the best of the others is below 80% of guessing"""
    seed: int = 0  # seed of everything: initial weights, split, order, dropout, rescaling

    def __post_init__(self) -> None:
        for name in ("datasets", "methods", "inits", "dropouts", "step_sizes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise PathError(f"--{name.replace('_', '-')}: expected at least one, each once")
        names = list(map(short_name, self.datasets))
        if len(set(names)) < len(names):
            raise PathError(f"--datasets: {', '.join(names)}: each needs a name of its own")
        if self.repeats < 1 or self.more_repeats < 0 or self.validation < 1:
            raise PathError("--repeats and --validation have to be at least 1, --more-repeats at least 0")
        if self.more_repeats and not self.compares_starts:
            raise PathError("more repeats are for verdicts on the claims, which need two --inits")
        list(self.all_search_runs())  # makes every run, and so checks every number

    @property
    def compares_starts(self) -> bool:
        """Whether the paper's claims are judged; with one initialisation the methods are ranked instead."""
        return len(self.inits) > 1

    def cells(self) -> list[Cell]:
        options = itertools.product(self.datasets, self.dropouts, self.inits, self.methods)
        return [Cell(*values) for values in options]

    def all_search_runs(self) -> Iterator[Run]:
        """Search runs of all cells, without the checksums of the data."""
        return (run for cell in self.cells() for run in self.search_runs(cell, ""))

    def search_runs(self, cell: Cell, data: str) -> list[Run]:
        """Runs that choose the step size of a cell; ``data`` is the checksum of its data set."""
        grace = max(self.search_epochs // 3, 1) if self.early_stop else 0
        changes: dict[str, Any] = {"epochs": self.search_epochs, "validation": self.validation}
        return [replace(self._run(cell, data, size), **changes, grace=grace) for size in self.step_sizes]

    def final_runs(self, cell: Cell, data: str, step_size: float, more: bool = False) -> list[Run]:
        """Runs on all the training data, one for each repeat; or, if ``more``, the further ones."""
        run = self._run(cell, data, step_size)
        first, last = (self.repeats, self.repeats + self.more_repeats) if more else (0, self.repeats)
        return [replace(run, seed=self._seeds(k)) for k in range(first, last)]

    def exact_run(self, cell: Cell, data: str, step_size: float) -> Run | None:
        """First final run of a balanced cell of an invariant method, rescaled by powers of two."""
        if not self.compares_starts or cell.init != "balanced" or not find_method(cell.method).invariant:
            return None
        return replace(self._run(cell, data, step_size), init="powers-of-two")

    def _run(self, cell: Cell, data: str, step_size: float) -> Run:
        return Run(
            dataset=cell.dataset, method=cell.method, step_size=step_size, init=cell.init,
            dropout=cell.dropout, net=self.net, hidden=self.hidden, batch=self.batch, p=self.p,
            centre=self.centre, tf32=self.tf32, seed=self._seeds(0), data=data, epochs=self.epochs,
        )  # fmt: skip

    def _seeds(self, repeat: int) -> Seeds:
        seed = self.seed + repeat
        return Seeds(init=seed, split=self.seed, order=seed, dropout=seed, rescaling=seed)


PRESETS = {
    "small": Study(hidden=(256, 256), epochs=40, validation=300, repeats=3, step_sizes=ALL_STEP_SIZES[:7]),
    "paper": Study(datasets=("mnist", "cifar10", "cifar100", "svhn")),
}


@dataclass(frozen=True)
class Setup:
    """Folder of the data, device and checkpoints of runs. Changes none of their numbers."""

    data_dir: Path | None = None
    """folder of the data sets; by default $PATHSGD_DATA, or ~/.cache/pathsgd/data"""
    download: bool = True  # download data sets that are missing
    device: str | None = None  # cpu, cuda, cuda:1; by default a GPU if there is one
    checkpoint_seconds: float = 30.0  # save a run every so often; an interrupted one is resumed from there


@dataclass(frozen=True)
class StudySetup(Setup):
    lanes: int | None = None  # runs at a time on a CPU; by default small networks one per core, at most 4
    replace: bool = False  # let this study replace another in its folder
