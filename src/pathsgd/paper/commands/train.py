"""``pathsgd train``: one run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from pathsgd.console.command_line import parse, parse_known
from pathsgd.paper.commands.common import loaded, place_of, reporting
from pathsgd.paper.commands.options import RunOptions
from pathsgd.paper.config import Run, Setup
from pathsgd.paper.config_json import from_json
from pathsgd.paper.experiment import store
from pathsgd.paper.experiment.execute import execute
from pathsgd.paper.experiment.manifest import note
from pathsgd.paper.experiment.problem import checksum, problem_of
from pathsgd.paper.experiment.record import Folder, Line
from pathsgd.paper.optimizers import find_method


@dataclass(frozen=True)
class Source:
    """Where the defaults of the other options come from."""

    config: Path | None = None
    """start from a configuration: the config.json of a run"""


@dataclass(frozen=True)
class Train(Source):
    """Trains one network.

    Loss and error after every epoch are recorded in DIR/runs/NAME/metrics.jsonl, with the configuration
    beside it and a checkpoint that torch.load(..., weights_only=True) reads. After Ctrl-C or a crash the same
    command resumes from the checkpoint. A run that diverges is recorded as diverged, and the exit code is 1.

    Muon takes matrices only; other parameters (biases, convolutions) are trained by SGD at the same rate.

    examples:
      pathsgd train --method path-sgd --lr 0.1 --hidden 256 256
      pathsgd train --dataset mnist --method adam --lr 1e-4 --dropout 0.5 --epochs 50 --device cuda
      pathsgd train --config pathsgd-train/runs/NAME/config.json --epochs 40 --json
    """

    run: Annotated[RunOptions, arg(name="")] = field(default_factory=RunOptions)
    setup: Annotated[Setup, arg(name="")] = field(default_factory=Setup)
    out: Path = Path("pathsgd-train")
    """folder of the results"""
    quiet: bool = False
    """print results only"""
    json: bool = False
    """print JSON, and no progress"""


def main(arguments: Sequence[str]) -> int:
    source = parse_known(Source, arguments, "train").config
    start = Run() if source is None else from_json(Run, store.read_json(source), str(source))
    options = parse(Train, arguments, "train", Train(config=source, run=RunOptions.of(start)))
    run, setup, out = options.run.run(), options.setup, options.out
    datasets = loaded([run.dataset], setup)
    place = place_of(setup, datasets, run, [run.method], out, keep_checkpoints=True)
    run = dataclasses.replace(run, data=checksum(datasets[run.dataset]))
    with reporting(setup, options.quiet or options.json, out) as reporter:
        problem = problem_of(datasets[run.dataset], run, place.device)
        reporter.phase(find_method(run.method).label, run.epochs)

        def on_epoch(run: Run, line: Line) -> None:
            reporter.epoch(run, line)
            reporter.say(describe(line))

        before = Folder(place.runs, run).recorded()
        if before is None:
            note(place.runs / run.name / "manifest.json", place.device)
        ended = execute(run, problem, place.runs, on_epoch, place.habits)
        reporter.ended(ended)
    folder = place.runs / run.name
    if options.json:
        found = {"folder": str(folder), "status": ended.status, "reason": ended.reason,
                 "run": dataclasses.asdict(run), "epochs": ended.lines}  # fmt: skip
        print(json.dumps(found, indent=1))
    else:
        print(f"{ended.status}{f': {ended.reason}' if ended.reason else ''}: {describe(ended.lines[-1])}")
        print(f"{'recorded before' if before == ended else 'recorded'} in {folder}")
    return 1 if ended.status == "diverged" else 0


def describe(line: Line) -> str:
    """The numbers of an epoch in one line of text."""
    numbers = [f"{k.replace('_', ' ')} {_format(k, value)}" for k, value in line.items() if k != "epoch"]
    return f"epoch {line['epoch']}: {', '.join(numbers)}"


def _format(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.2%}" if name.endswith("error") else f"{value:.4g}"
