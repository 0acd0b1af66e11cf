"""Configurations as frozen dataclasses: one training run, a whole study, and where they are run."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pathsgd import PathError
from pathsgd.paper.data.dataset import short_name
from pathsgd.paper.optimizers import find_method

Init = Literal["balanced", "unbalanced", "powers-of-two"]
ALL_STEP_SIZES = tuple(10.0**-a for a in range(11))


@dataclass(frozen=True)
class Seeds:
    """One seed for each thing that is drawn, so that one can be changed and the others held."""

    FOUNDING_FIELDS: ClassVar = frozenset({"init", "split", "order", "dropout", "rescaling"})

    init: int = 0
    """seed of the balanced weights"""
    split: int = 0
    """seed of the points kept out for validation"""
    order: int = 0
    """seed of the order of the training points"""
    dropout: int = 0
    """seed of the units dropped"""
    rescaling: int = 0
    """seed of the rescaling that unbalances"""


@dataclass(frozen=True)
class Run:
    """One training run: everything its numbers depend on.

    Example:
        >>> run = Run(method="sgd", step_size=0.1)
        >>> run.name
        'digits-sgd-balanced-0.1-test-18749d9b7ce3'
    """

    FOUNDING_FIELDS: ClassVar = frozenset(
        {"dataset", "method", "step_size", "init", "dropout", "net", "hidden", "batch", "epochs",
         "validation", "p", "centre", "tf32", "grace", "seed", "data"}
    )  # fmt: skip
    """Always part of a run's name. A field that is added later is part of it only where it is not at its
    default, so the names of recorded runs stay as they are. Never add to this set."""

    dataset: str = "digits"
    """digits, mnist, cifar10, cifar100, svhn, or name=path.npz"""
    method: str = "path-sgd"
    """the optimizer: sgd, adagrad, path-sgd, momentum, adam, adamw, muon, path-momentum, path-adagrad,
    path-adam, path-adamw"""
    step_size: float = 1e-2
    """the learning rate"""
    init: Init = "balanced"
    """N(0, 1/fan_in); or the same unbalanced, a quarter of the hidden units rescaled by 10 c with c
    log-normal; or by the power of two nearest to that"""
    dropout: float = 0.0
    """probability with which a hidden unit is dropped"""
    net: str = "mlp"
    """mlp: linear layers; conv: convolutions with pooling and one linear hidden layer; package.module:make or
    file.py:make: a network of your own, made by calling make(features, classes)"""
    hidden: tuple[int, ...] = (256, 256)
    """hidden units of each layer (conv: channels, then units)"""
    batch: int = 100
    """points in a mini-batch; an epoch leaves out what does not fill one"""
    epochs: int = 20
    """epochs"""
    validation: int = 0
    """training points kept out and evaluated on; 0 trains on all and evaluates on the test set"""
    p: float = 2.0
    """order of the path norm"""
    centre: bool = True
    """subtract the training mean from every input feature"""
    tf32: bool = False
    """let products and convolutions on a GPU round their inputs to tf32"""
    grace: int = 0
    """stop after this many epochs if the error is then not below 90% of guessing (0: never)"""
    seed: Seeds = field(default_factory=Seeds)
    """seeds of everything that is drawn"""
    data: str = ""
    """checksum of the data, filled in when the run is started: other data is another run"""

    def __post_init__(self) -> None:
        find_method(self.method)
        _check_run(self)

    @property
    def evaluates_on(self) -> str:
        """``validation`` or ``test``."""
        return "validation" if self.validation else "test"

    @property
    def name(self) -> str:
        """The name of the run's folder: readable, and different for each configuration."""
        text = json.dumps(_identity(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        data = re.sub(r"[^A-Za-z0-9_.-]", "_", short_name(self.dataset))[:32]
        dropout = f"-dropout{self.dropout:g}" if self.dropout else ""
        return f"{data}-{self.method}-{self.init}{dropout}-{self.step_size:g}-{self.evaluates_on}-{digest}"


def _identity(config: Run | Seeds) -> dict[str, Any]:
    """The fields that name a run: the founding ones, and later ones that are not at their default."""
    return {
        name: _identity(value) if isinstance(value, Seeds) else value
        for (name, value), default in zip(vars(config).items(), vars(type(config)()).values(), strict=True)
        if name in config.FOUNDING_FIELDS or value != default
    }


def _check_run(run: Run) -> None:
    seeds = dataclasses.asdict(run.seed)
    checks = [
        (
            run.net in ("mlp", "conv") or ":" in run.net,
            f"Invalid net: {run.net!r} (mlp, conv or package.module:function)",
        ),
        (
            ":" not in run.net or not run.dropout,
            "dropout is for mlp and conv: a network of your own brings its own",
        ),
        (0 < run.step_size < 1e38, f"Invalid step size: {run.step_size} (more than 0)"),
        *((0 <= s < 1 << 63, f"Invalid seed of {name}: {s} (at least 0)") for name, s in seeds.items()),
        (0 <= run.dropout < 1, f"Invalid dropout: {run.dropout} (at least 0, less than 1)"),
        (
            min(run.hidden, default=0) > 0,
            f"Invalid hidden layers: {run.hidden} (at least one, each at least 1)",
        ),
        (run.batch > 0, f"Invalid batch: {run.batch} (at least 1)"),
        (run.epochs > 0, f"Invalid number of epochs: {run.epochs} (at least 1)"),
        (run.validation >= 0, f"Invalid number of validation points: {run.validation} (at least 0)"),
        (run.grace >= 0, f"Invalid grace: {run.grace} (at least 0)"),
        (1 <= run.p < math.inf, f"Invalid p: {run.p} (runs take 1 <= p < inf)"),
    ]
    for holds, message in checks:
        if not holds:
            raise PathError(message)


@dataclass(frozen=True)
class Cell:
    """What one step size is chosen for: the fields are those of a :class:`Run`."""

    dataset: str
    """the name of the data set"""
    dropout: float
    """probability with which a hidden unit is dropped"""
    init: Init
    """the initialisation"""
    method: str
    """the optimizer"""


@dataclass(frozen=True)
class Study:
    """What is compared, at what size. The defaults are the paper's.

    Example:
        >>> study = Study(methods=("sgd", "path-sgd"), dropouts=(0.0,))
        >>> len(study.cells())  # two methods from two initialisations
        4
    """

    datasets: tuple[str, ...] = ("digits",)
    """any of digits, mnist, cifar10, cifar100, svhn, name=path.npz"""
    methods: tuple[str, ...] = ("sgd", "adagrad", "path-sgd")
    """any of sgd, adagrad, path-sgd, momentum, adam, adamw, muon, path-momentum, path-adagrad, path-adam,
    path-adamw"""
    inits: tuple[Init, ...] = ("balanced", "unbalanced")
    """initialisations: balanced, unbalanced, powers-of-two"""
    dropouts: tuple[float, ...] = (0.0, 0.5)
    """probabilities with which hidden units are dropped"""
    step_sizes: tuple[float, ...] = ALL_STEP_SIZES
    """step sizes to choose from"""
    net: str = "mlp"
    """mlp: linear layers; conv: convolutions with pooling and one linear hidden layer"""
    hidden: tuple[int, ...] = (4000, 4000)
    """hidden units of each layer (conv: channels, then units)"""
    batch: int = 100
    """points in a mini-batch"""
    search_epochs: int = 20
    """epochs of the runs that choose a step size"""
    epochs: int = 100
    """epochs of the final runs"""
    validation: int = 10_000
    """training points kept out for choosing a step size"""
    repeats: int = 1
    """final runs of each kind, with other seeds each time"""
    more_repeats: int = 0
    """further final runs of those of which a verdict cannot be told and hangs on the number of seeds"""
    p: float = 2.0
    """order of the path norm"""
    centre: bool = True
    """subtract the training mean from every input feature"""
    tf32: bool = False
    """let products and convolutions on a GPU round their inputs to tf32"""
    early_stop: bool = True
    """stop a search run whose validation error after a third of its epochs is not below 90% of guessing; it
    is resumed unless the best of the others is below 80% of guessing"""
    seed: int = 0
    """seed of everything: initial weights, split, order, dropout, rescaling"""

    def __post_init__(self) -> None:
        for name in ("datasets", "methods", "inits", "dropouts", "step_sizes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise PathError(f"--{name.replace('_', '-')}: expected at least one, each once")
        names = list(map(short_name, self.datasets))
        if len(set(names)) < len(names):
            raise PathError(f"--datasets: {', '.join(names)}: each needs a name of its own")
        if self.net not in ("mlp", "conv"):
            raise PathError(f"Invalid net: {self.net!r} (mlp or conv; only single runs take one of your own)")
        if self.repeats < 1:
            raise PathError(f"Invalid number of repeats: {self.repeats} (at least 1)")
        if self.more_repeats < 0:
            raise PathError(f"Invalid number of more repeats: {self.more_repeats} (at least 0)")
        if self.more_repeats and not self.compares_starts:
            raise PathError("more repeats are for verdicts on the claims, which need two --inits")
        if not self.validation:
            raise PathError("a study needs validation points to choose step sizes: --validation")
        list(self.all_search_runs())  # makes every run, and so checks every number

    @property
    def compares_starts(self) -> bool:
        """Whether the paper's claims are judged; with one initialisation the methods are ranked instead."""
        return len(self.inits) > 1

    def cells(self) -> list[Cell]:
        """Everything a step size is chosen for."""
        options = itertools.product(self.datasets, self.dropouts, self.inits, self.methods)
        return [Cell(*values) for values in options]

    def all_search_runs(self) -> Iterator[Run]:
        """The search runs of all cells, without the checksums of the data."""
        return (run for cell in self.cells() for run in self.search_runs(cell, ""))

    def search_runs(self, cell: Cell, data: str) -> list[Run]:
        """The runs that choose the step size of a cell; ``data`` is the checksum of its data set."""
        grace = max(self.search_epochs // 3, 1) if self.early_stop else 0
        return [
            replace(
                self._run(cell, data, size),
                epochs=self.search_epochs,
                validation=self.validation,
                grace=grace,
            )
            for size in self.step_sizes
        ]

    def final_runs(self, cell: Cell, data: str, step_size: float, more: bool = False) -> list[Run]:
        """The runs on all the training data, one for each repeat; or, if ``more``, the further ones."""
        run = self._run(cell, data, step_size)
        first, last = (self.repeats, self.repeats + self.more_repeats) if more else (0, self.repeats)
        return [replace(run, seed=self._seeds(k)) for k in range(first, last)]

    def exact_run(self, cell: Cell, data: str, step_size: float) -> Run | None:
        """The first final run from weights rescaled by powers of two, which rounds nothing.

        None where the rescaled copy need not agree: only balanced cells of invariant methods have one. Nor is
        there one in a study that compares no starts.
        """
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
    "small": Study(
        hidden=(256, 256), search_epochs=20, epochs=40, validation=300, repeats=3,
        step_sizes=ALL_STEP_SIZES[:7],
    ),
    "paper": Study(datasets=("mnist", "cifar10", "cifar100", "svhn")),
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """Where the data is and how runs are trained. Changes none of their numbers."""

    data_dir: Path | None = None
    """folder of the data sets; by default $PATHSGD_DATA, or ~/.cache/pathsgd/data"""
    download: bool = True
    """download data sets that are missing"""
    device: str | None = None
    """cpu, cuda, cuda:1; by default a GPU if there is one"""
    checkpoint_seconds: float = 30.0
    """save a run every so often; an interrupted one is resumed from there"""
    tensorboard: bool = False
    """also write the numbers for TensorBoard"""

    def __post_init__(self) -> None:
        if not self.checkpoint_seconds >= 0:
            raise PathError(f"Invalid --checkpoint-seconds: {self.checkpoint_seconds} (at least 0)")


@dataclass(frozen=True)
class StudySetup(Setup):
    """The same for a study of many runs."""

    lanes: int | None = None
    """runs at a time; by default three on a GPU, small networks on a CPU one per core, at most 4; with Ray on
    each GPU, and on CPUs by default as many as it has"""
    replace: bool = False
    """let this study replace another in its folder"""
    executor: Literal["local", "ray"] = "local"
    """local: this process trains the runs; ray: each is a task on a Ray cluster, recorded by this process"""
    address: str | None = None
    """of the Ray cluster: HOST:PORT, or auto on one of its nodes; by default $RAY_ADDRESS, or a cluster that
    is started on this machine"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.executor not in ("local", "ray"):
            raise PathError(f"Invalid executor: {self.executor!r} (local or ray)")
        if self.address is not None and self.executor != "ray":
            raise PathError("--address is for --executor ray")
