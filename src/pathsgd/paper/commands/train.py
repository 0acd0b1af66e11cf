"""``pathsgd train``: one run."""

from __future__ import annotations

import argparse
from pathlib import Path

from pathsgd.console.options import add_options, given, merged
from pathsgd.paper import Run, Setup, TerminalProgress, train
from pathsgd.paper.commands.common import add_place, setup_of
from pathsgd.paper.config_json import from_json
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.progress import describe_metrics
from pathsgd.paper.records.json_files import read_json

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
        start = from_json(Run, read_json(options.config), str(options.config))
    out = options.out or Path("pathsgd-train")
    progress = TerminalProgress(options.quiet, every_epoch=True)
    record = train(merged(start, given(options, Run)), out, setup_of(options, Setup), progress=progress)
    reason = f": {record.reason}" if record.reason else ""
    print(f"{record.status}{reason}: {describe_metrics(record.lines[-1])}")
    print(f"recorded in {out / 'runs' / record.run.name}")
    return 1 if record.status == "diverged" else 0
