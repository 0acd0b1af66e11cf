"""``pathsgd sweep``: step sizes only."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from pathsgd.paper.commands.common import add_place, loaded, place_of, reporting
from pathsgd.paper.experiment.conduct import record_head, search
from pathsgd.paper.experiment.study import PRESETS, Study
from pathsgd.paper.options import add_options, given, merged
from pathsgd.paper.tables import choices_table, printed

HELP = "choose step sizes on validation points"
DESCRIPTION = """\
The first half of `pathsgd reproduce`: for every data set, method, initialisation and dropout,
runs of every step size on part of the training data, and the one with the lowest validation
error, of equals the one that reaches it in fewer epochs. Runs that diverge are recorded as
diverged. A run that after a third of its epochs has not learned anything is stopped, and carried
on unless another is clearly ahead.

example:
  pathsgd sweep --methods sgd path-sgd --step-sizes 1 0.3 0.1 0.03 0.01 --inits balanced --dropouts 0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="small", help="what the options change (default: small)"
    )
    group = parser.add_argument_group("the study", "the defaults shown are those of --preset small")
    add_options(group, Study, **dataclasses.asdict(PRESETS["small"]))
    add_place(parser, "pathsgd-sweep")


def run(options: argparse.Namespace) -> int:
    study = merged(PRESETS[options.preset], given(options, Study))
    out = options.out or Path("pathsgd-sweep")
    datasets = loaded(study.datasets, options)
    place = place_of(options, datasets, study.hidden, study.methods, out)
    with reporting(options, out) as reporter:
        record_head(study, datasets, place)
        choices = search(study, datasets, place, reporter)
    print("\n" + printed(choices_table(choices)))
    print(f"\nrecorded in {out}")
    return 0 if all(choice.best for choice in choices) else 1
