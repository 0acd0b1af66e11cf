"""The commands: dataclasses whose fields are options, and whose docstring ``--help`` prints."""

import contextlib
import inspect
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import arg

from pathsgd import PathError
from study.api import redraw, reproduce, sweep, train
from study.config import PRESETS, Run, Setup, Study, StudySetup
from study.data import TABLE_1, Dataset, dimensionality
from study.demo import show_demo
from study.files import from_json, read_json
from study.learning_curves import title_of
from study.run_queue import Progress
from study.runs import StudyResults
from study.sources import SOURCES, default_data_dir, describe_missing, load
from study.tables import align, summarize_study, tabulate_choices

T = TypeVar("T")
MARKERS = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)


@dataclass(frozen=True)
class Demo:
    """Shows in about a minute what rescaling does to training.

    One step on the paper's Figure 1 (c), then digits: six methods from a network and from a rescaled copy of
    it. The figure goes to pathsgd-demo, or to --out, and opens where there is a screen.

    example:
      python -m study demo
    """

    out: Path = Path("pathsgd-demo")  # folder of the figure


def run_demo(arguments: Sequence[str]) -> int:
    show_demo(_parse(Demo, arguments, "demo").out)
    return 0


@dataclass(frozen=True)
class Preset:
    preset: str = "small"
    """small: digits and two hidden layers of 256 units; paper: the paper's data sets at full size, for a GPU.
    The other options change it, and show its values as their defaults."""


@dataclass(frozen=True)
class StudyCommand(Preset):
    study: Annotated[Study, arg(name="")] = field(default_factory=Study)
    setup: Annotated[StudySetup, arg(name="")] = field(default_factory=StudySetup)
    out: Path | None = None  # folder of the results
    quiet: bool = False  # print results only


@dataclass(frozen=True)
class Reproduce(StudyCommand):
    """Runs the paper's experiments.

    For every data set, method, initialisation and dropout it chooses a step size on validation points, then
    trains on all the training data. It ends with tables, the paper's seven claims with a verdict each, the
    figures and a report; from one start (--inits balanced) it says instead which method is first. Results go
    to pathsgd-PRESET, or to --out. After Ctrl-C or a crash the same command resumes, and on a CPU ends with
    the same numbers to the last bit. A changed study keeps the runs it has in common with the old.

    examples:
      python -m study reproduce
      python -m study reproduce --methods sgd adam path-sgd path-adam --repeats 1
      python -m study reproduce --preset paper --dataset mnist cifar10 --device cuda --data-dir ~/data
    """


def run_reproduce(arguments: Sequence[str]) -> int:
    options = _parse_study(Reproduce, arguments, "reproduce")
    out = options.out or Path(f"pathsgd-{options.preset}")
    _print_summary(reproduce(options.study, out, options.setup, progress=Progress(options.quiet)))
    return 0


@dataclass(frozen=True)
class Sweep(StudyCommand):
    """Chooses step sizes on validation points: the first half of `python -m study reproduce`.

    The lowest validation error wins, of equals the one that is reached in fewer epochs. A run that has not
    learned anything after a third of its epochs is stopped, and trained to the end only if no other is
    clearly ahead. Results go to pathsgd-sweep, or to --out. The exit code is 1 if no step size of some cell
    ended well.

    example:
      python -m study sweep --methods sgd path-sgd --step-sizes 1 0.3 0.1 0.03 0.01 --inits balanced
    """


def run_sweep(arguments: Sequence[str]) -> int:
    options = _parse_study(Sweep, arguments, "sweep")
    out = options.out or Path("pathsgd-sweep")
    choices = sweep(options.study, out, options.setup, progress=Progress(options.quiet))
    print(f"\n{tabulate_choices(choices)}\n\nrecorded in {out}")
    return 0 if all(choice.best for choice in choices) else 1


@dataclass(frozen=True)
class ConfigFile:
    config: Path | None = None  # start from a configuration: the config.json of a run


@dataclass(frozen=True)
class Train(ConfigFile):
    """Trains one network of linear layers with ReLU between them.

    Loss and error after every epoch are recorded in DIR/runs/NAME/metrics.jsonl, with the configuration
    beside it and a checkpoint that torch.load(..., weights_only=True) reads, from which the same command
    resumes. A run that diverges is recorded as diverged, and the exit code is 1.

    examples:
      python -m study train --method path-sgd --lr 0.1 --hidden 256 256
      python -m study train --dataset mnist --method adam --lr 1e-4 --dropout 0.5 --epochs 50 --device cuda
      python -m study train --config pathsgd-train/runs/NAME/config.json --epochs 40
    """

    run: Annotated[Run, arg(name="")] = field(default_factory=Run)
    setup: Annotated[Setup, arg(name="")] = field(default_factory=Setup)
    out: Path = Path("pathsgd-train")  # folder of the results
    quiet: bool = False  # print results only


def run_train(arguments: Sequence[str]) -> int:
    source = _parse_known(ConfigFile, arguments).config
    start = Run() if source is None else from_json(Run, read_json(source), str(source))
    options = _parse(Train, arguments, "train", Train(config=source, run=start))
    progress = Progress(options.quiet, every_epoch=True)
    record = train(options.run, options.out, options.setup, progress=progress)
    print(f"{record.status}: {record.reason}" if record.reason else record.status)
    print(f"recorded in {options.out / 'runs' / record.run.name}")
    return 1 if record.status == "diverged" else 0


@dataclass(frozen=True)
class Figures:
    """Draws the paper's figures 1 to 5, prints the tables and the claims, and writes report.html.

    All from the numbers that `python -m study reproduce` recorded in a folder. Nothing is trained.

    example:
      python -m study figures pathsgd-small
    """

    folder: tyro.conf.Positional[Path]  # the folder of a study: --out of `python -m study reproduce`


def run_figures(arguments: Sequence[str]) -> int:
    _print_summary(redraw(_parse(Figures, arguments, "figures").folder, progress=Progress(quiet=False)))
    return 0


def _print_summary(results: StudyResults) -> None:
    print(f"\n{summarize_study(results)}")
    print(f"\nfigures: {results.out / 'figures'}\nreport:  {results.out / 'report.html'}")


@dataclass(frozen=True)
class Data:
    """Loads data sets, checks every file of them, and prints the paper's Table 1 from what was loaded.

    With names, those are loaded, and downloaded first where they are missing: mnist (12 MB), cifar10 and
    cifar100 (170 MB each), svhn (246 MB). Downloads count only once their sha256 is that of the original.
    Without names, digits and those that are found in the data folder. NAME=FILE.npz is your own, with
    train_x, train_y, test_x and test_y: inputs of uint8 or floats, one row or image each, and labels from 0.

    example:
      python -m study data mnist cifar10 --data-dir ~/data
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ()  # mnist, cifar10, cifar100, svhn, digits, NAME=FILE.npz
    data_dir: Path | None = None  # by default $PATHSGD_DATA, or ~/.cache/pathsgd/data
    download: bool = True  # download data sets that are named and missing


def run_data(arguments: Sequence[str]) -> int:
    options = _parse(Data, arguments, "data")
    data_dir = options.data_dir or default_data_dir()
    missing = [name for name, source in SOURCES.items() if source.find_files(data_dir).missing]
    names = options.names or (*(name for name in SOURCES if name not in missing), "digits")
    rows, errors = [], []
    for name in dict.fromkeys(names):
        try:
            rows.append(_make_row(load(name, data_dir, download=bool(options.names) and options.download)))
        except PathError as error:
            errors.append(str(error))
    if rows:
        print("\n".join(align([TABLE_1, *rows], "<<>>>")))
    for name in missing if not options.names else ():
        print(describe_missing(name, data_dir))
    for message in errors:
        print(f"study: {message}", file=sys.stderr)
    return 1 if errors else 0


def _make_row(data: Dataset) -> tuple[str, ...]:
    title, counts = title_of(data.name), (len(data.train_y), len(data.test_y))
    # Files can be sound and still be a part of the original, as where somebody cut them for a quick try.
    if data.name in SOURCES and SOURCES[data.name].counts != counts:
        title += ", a part of the original"
    return title, dimensionality(data.shape), *map(str, (data.classes, *counts))


MAIN = {
    "demo": run_demo, "reproduce": run_reproduce, "sweep": run_sweep, "train": run_train,
    "figures": run_figures, "data": run_data,
}  # fmt: skip


def _parse_study(config: type[StudyCommand], arguments: Sequence[str], command: str) -> StudyCommand:
    name = _parse_known(Preset, arguments).preset
    if name not in PRESETS:
        raise PathError(f"Unknown preset: {name!r} (one of {', '.join(PRESETS)})")
    return _parse(config, arguments, command, config(preset=name, study=PRESETS[name]))


def _parse(config: type[T], arguments: Sequence[str], command: str, default: T | None = None) -> T:
    """Reads the options of a command. Wrong ones end the process with exit code 2 and a message."""
    if "--help" in arguments or "-h" in arguments:
        print(inspect.getdoc(config), end="\n\n")  # tyro would join its lines
    given: dict[str, Any] = {} if default is None else {"default": default}
    prog = f"python -m study {command}"
    with _raise_path_errors():
        return tyro.cli(config, prog=prog, description="", args=arguments, config=MARKERS, **given)


def _parse_known(config: type[T], arguments: Sequence[str]) -> T:
    """Reads the options that the defaults of others depend on, and ignores the others."""
    with _raise_path_errors():
        return tyro.cli(config, args=arguments, config=MARKERS, return_unknown_args=True, add_help=False)[0]


@contextlib.contextmanager
def _raise_path_errors() -> Iterator[None]:
    """Raises the PathError of a dataclass, which tyro would print as a box before it exits."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as stop:
        cause = stop.__context__
        while cause is not None:
            if isinstance(cause, PathError):
                raise cause from None
            cause = cause.__context__
        print(printed.getvalue(), end="", file=sys.stderr)
        raise
