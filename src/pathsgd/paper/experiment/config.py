"""One training run as data: everything its numbers depend on, and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Literal

from pathsgd.console.options import option
from pathsgd.errors import PathError
from pathsgd.geometry.gamma import check_p
from pathsgd.paper.data.dataset import called

Init = Literal["balanced", "unbalanced", "powers-of-two"]
Net = Literal["mlp", "conv"]


@dataclass(frozen=True)
class Seeds:
    """One for each thing that is drawn, so that one can be changed and the others held."""

    init: int = option(0, "seed of the balanced weights")
    split: int = option(0, "seed of the points kept out for validation")
    order: int = option(0, "seed of the order of the training points")
    dropout: int = option(0, "seed of the units dropped")
    rescaling: int = option(0, "seed of the rescaling that unbalances")


@dataclass(frozen=True)
class Run:
    """A network, a data set, a method and a step size."""

    dataset: str = option("digits", "digits, mnist, cifar10, cifar100, svhn, or name=path.npz")
    method: str = option("path-sgd", "how weights are moved")
    step_size: float = option(1e-2, "the step size")
    init: Init = option(
        "balanced",
        "N(0, 1/fan_in); or the same unbalanced, a quarter of the hidden units rescaled by 10 c with c "
        "log-normal; or by the power of two nearest to that",
    )
    dropout: float = option(0.0, "probability with which a hidden unit is dropped")
    net: Net = option("mlp", "linear layers, or convolutions with pooling and one linear hidden layer")
    hidden: tuple[int, ...] = option((256, 256), "hidden units of each layer (conv: channels, then units)")
    batch: int = option(100, "points in a mini-batch; an epoch leaves out what does not fill one")
    epochs: int = option(20, "epochs")
    validation: int = option(
        0, "training points kept out and evaluated on; 0 trains on all and evaluates on the test set"
    )
    p: float = option(2.0, "order of the path norm")
    centre: bool = option(True, "subtract the training mean from every input feature")
    tf32: bool = option(False, "let products and convolutions on a GPU round their inputs to tf32")
    grace: int = option(
        0, "stop after so many epochs if the error is then not below 90% of guessing (0: never)"
    )
    seed: Seeds = field(default_factory=Seeds)
    data: str = ""
    """A checksum of the data: a run is not taken for one on other numbers."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def evaluates(self) -> str:
        """What its errors are measured on."""
        return "validation" if self.validation else "test"

    @property
    def name(self) -> str:
        """A folder's name: readable, and one for each configuration."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        data = re.sub(r"[^A-Za-z0-9_.-]", "_", called(self.dataset))[:32]
        dropout = f"-dropout{self.dropout:g}" if self.dropout else ""
        return f"{data}-{self.method}-{self.init}{dropout}-{self.step_size:g}-{self.evaluates}-{digest}"


def _check(run: Run) -> None:
    def must(holds: bool, what: str) -> None:
        if not holds:
            raise PathError(what)

    must(0 < run.step_size < 1e38, f"Invalid step size: {run.step_size} (more than 0)")
    for name, seed in dataclasses.asdict(run.seed).items():
        must(0 <= seed < 1 << 63, f"Invalid seed of {name}: {seed} (at least 0)")
    must(0 <= run.dropout < 1, f"Invalid dropout: {run.dropout} (at least 0, less than 1)")
    must(
        bool(run.hidden) and min(run.hidden) > 0,
        f"Invalid hidden layers: {run.hidden} (one or more, each at least 1)",
    )
    must(run.batch > 0, f"Invalid batch: {run.batch} (at least 1)")
    must(run.epochs > 0, f"Invalid number of epochs: {run.epochs} (at least 1)")
    must(run.validation >= 0, f"Invalid number of validation points: {run.validation} (at least 0)")
    must(run.grace >= 0, f"Invalid grace: {run.grace} (at least 0)")
    must(math.isfinite(check_p(run.p)), f"Invalid p: {run.p} (runs take finite ones)")
