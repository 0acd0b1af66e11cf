"""The configs of the study as options: short names for some, and a preset that the others change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from tyro.conf import Suppress, arg

from pathsgd.console.command_line import parse, parse_known
from pathsgd.errors import PathError
from pathsgd.paper.config import PRESETS, Init, Run, Seeds, Study, StudySetup


@dataclass(frozen=True)
class SeedOptions(Seeds):
    """The seeds, named --seed-order rather than --seed.order."""

    init: Annotated[int, arg(name="seed-init")] = 0
    split: Annotated[int, arg(name="seed-split")] = 0
    order: Annotated[int, arg(name="seed-order")] = 0
    dropout: Annotated[int, arg(name="seed-dropout")] = 0
    rescaling: Annotated[int, arg(name="seed-rescaling")] = 0


@dataclass(frozen=True)
class RunOptions(Run):
    """A run with short names for its options."""

    step_size: Annotated[float, arg(aliases=("--lr",))] = Run.step_size
    seed: Annotated[SeedOptions, arg(name="")] = field(default_factory=SeedOptions)
    data: Suppress[str] = ""

    @classmethod
    def of(cls, run: Run) -> RunOptions:
        return cls(**{**vars(run), "seed": SeedOptions(**vars(run.seed))})

    def to_run(self) -> Run:
        return Run(**{**vars(self), "seed": Seeds(**vars(self.seed))})


@dataclass(frozen=True)
class StudyOptions(Study):
    """A study with short names for its options."""

    datasets: Annotated[tuple[str, ...], arg(aliases=("--dataset",))] = Study.datasets
    methods: Annotated[tuple[str, ...], arg(aliases=("--method",))] = Study.methods
    inits: Annotated[tuple[Init, ...], arg(aliases=("--init",))] = Study.inits
    dropouts: Annotated[tuple[float, ...], arg(aliases=("--dropout",))] = Study.dropouts
    step_sizes: Annotated[tuple[float, ...], arg(aliases=("--step-size", "--lr"))] = Study.step_sizes

    def to_study(self) -> Study:
        return Study(**vars(self))


@dataclass(frozen=True)
class Preset:
    """What the other options change."""

    preset: str = "small"
    """small: digits and two hidden layers of 256 units; paper: the paper's data sets at full size, for a GPU.
    The other options change it, and show its values as their defaults."""


@dataclass(frozen=True)
class StudyCommand(Preset):
    """A study, and where and how it is run."""

    study: Annotated[StudyOptions, arg(name="")] = field(default_factory=StudyOptions)
    setup: Annotated[StudySetup, arg(name="")] = field(default_factory=StudySetup)
    out: Path | None = None
    """folder of the results"""
    quiet: bool = False
    """print results only"""


StudyCommandT = TypeVar("StudyCommandT", bound=StudyCommand)


def parse_study(config: type[StudyCommandT], arguments: Sequence[str], command: str) -> StudyCommandT:
    """Reads the preset first, since the other options change it."""
    name = parse_known(Preset, arguments, command).preset
    if name not in PRESETS:
        raise PathError(f"Unknown preset: {name!r} (one of {', '.join(PRESETS)})")
    preset = StudyOptions(**vars(PRESETS[name]))
    return parse(config, arguments, command, config(preset=name, study=preset))
