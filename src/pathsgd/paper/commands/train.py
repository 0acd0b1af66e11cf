"""``pathsgd train``: one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from pathsgd.console.command_line import parse, parse_known
from pathsgd.paper import Run, Setup, TerminalProgress, train
from pathsgd.paper.commands.options import RunOptions
from pathsgd.paper.config_json import from_json
from pathsgd.paper.progress import describe_metrics
from pathsgd.paper.records.json_files import read_json


@dataclass(frozen=True)
class ConfigFile:
    """Where the defaults of the other options come from."""

    config: Path | None = None
    """start from a configuration: the config.json of a run"""


@dataclass(frozen=True)
class Train(ConfigFile):
    """Trains one network.

    Loss and error after every epoch are recorded in DIR/runs/NAME/metrics.jsonl, with the configuration
    beside it and a checkpoint that torch.load(..., weights_only=True) reads. After Ctrl-C or a crash the same
    command resumes from the checkpoint. A run that diverges is recorded as diverged, and the exit code is 1.

    Muon takes matrices only; other parameters (biases, convolutions) are trained by SGD at the same rate.

    --net my_package.nets:make or --net nets.py:make trains a network of your own. make(features, classes) has
    to return an nn.Module that maps inputs (n, features) to outputs (n, classes). It is trained with the
    weights it draws, and rescaled first by --init unbalanced; --hidden and --dropout do not apply. The run is
    found by the name of the function: after a change of its code, take another --out.

    examples:
      pathsgd train --method path-sgd --lr 0.1 --hidden 256 256
      pathsgd train --dataset mnist --method adam --lr 1e-4 --dropout 0.5 --epochs 50 --device cuda
      pathsgd train --net nets.py:make --dataset mine=features.npz --method path-adam --lr 0.01
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
    source = parse_known(ConfigFile, arguments, "train").config
    start = Run() if source is None else from_json(Run, read_json(source), str(source))
    options = parse(Train, arguments, "train", Train(config=source, run=RunOptions.of(start)))
    progress = TerminalProgress(options.quiet or options.json, every_epoch=True)
    record = train(options.run.to_run(), options.out, options.setup, progress=progress)
    folder = options.out / "runs" / record.run.name
    if options.json:
        found = {"folder": str(folder), "status": record.status, "reason": record.reason,
                 "run": asdict(record.run), "epochs": record.lines}  # fmt: skip
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        status = f"{record.status}: {record.reason}" if record.reason else record.status
        print(f"{status}: {describe_metrics(record.lines[-1])}\nrecorded in {folder}")
    return 1 if record.status == "diverged" else 0
