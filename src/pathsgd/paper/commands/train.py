"""``pathsgd train``: one run."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

from pathsgd.console.options import add_options, from_json, given, merged
from pathsgd.paper.commands.common import add_place, loaded, place_of, reporting
from pathsgd.paper.config import Run
from pathsgd.paper.experiment import store
from pathsgd.paper.experiment.execute import execute
from pathsgd.paper.experiment.manifest import note
from pathsgd.paper.experiment.problem import checksum, problem_of
from pathsgd.paper.experiment.record import Folder, Line
from pathsgd.paper.optimizers import METHODS, find_method

HELP = "one training run"
DESCRIPTION = f"""\
Trains one network and records loss and error after every epoch in DIR/runs/NAME/metrics.jsonl,
with its configuration beside it and a checkpoint that torch.load(..., weights_only=True) reads.
Interrupted, the same command goes on from the checkpoint. A run that diverges is recorded as
diverged; the exit code is then 1.

methods:
{chr(10).join(f"  {name:14} {kind.label}" for name, kind in METHODS.items())}
Muon takes matrices only; what is none (biases, convolutions) moves by SGD at the same step size.

examples:
  pathsgd train --method path-sgd --step-size 0.1 --hidden 256 256
  pathsgd train --dataset mnist --method adam --step-size 1e-4 --dropout 0.5 --epochs 50 --device cuda
  pathsgd train --config pathsgd-train/runs/NAME/config.json --epochs 40"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="start from a configuration: the config.json of a run"
    )
    add_options(parser.add_argument_group("the run"), Run)
    add_place(parser, "pathsgd-train")


def run(options: argparse.Namespace) -> int:
    start = Run()
    if options.config is not None:
        start = from_json(Run, store.read_json(options.config), str(options.config))
    config = merged(start, given(options, Run))
    find_method(config.method)
    out = options.out or Path("pathsgd-train")
    datasets = loaded([config.dataset], options)
    place = place_of(options, datasets, config, [config.method], out, keep_checkpoints=True)
    config = dataclasses.replace(config, data=checksum(datasets[config.dataset]))
    with reporting(options, out) as reporter:
        problem = problem_of(datasets[config.dataset], config, place.device)
        reporter.phase(find_method(config.method).label, config.epochs)

        def watch(run: Run, line: Line) -> None:
            reporter.epoch(run, line)
            reporter.say(described(line))

        before = Folder(place.runs, config).recorded()
        if before is None:
            note(place.runs / config.name / "manifest.json", place.device)
        ended = execute(config, problem, place.runs, watch, place.habits)
        reporter.ended(ended)
    print(f"{ended.status}{f': {ended.reason}' if ended.reason else ''}: {described(ended.lines[-1])}")
    print(f"{'recorded before' if before == ended else 'recorded'} in {place.runs / config.name}")
    return 1 if ended.status == "diverged" else 0


def described(line: Line) -> str:
    rest = ", ".join(
        f"{name.replace('_', ' ')} {_number(name, value)}" for name, value in line.items() if name != "epoch"
    )
    return f"epoch {line['epoch']}: {rest}"


def _number(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.2%}" if name.endswith("error") else f"{value:.4g}"
