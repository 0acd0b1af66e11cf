"""``pathsgd sweep``: step sizes only."""

from __future__ import annotations

import argparse
from pathlib import Path

from pathsgd.paper import StudySetup, TerminalProgress, sweep, tabulate_choices
from pathsgd.paper.commands.common import add_study, add_study_place, setup_of, study_of

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
    add_study(parser)
    add_study_place(parser, "pathsgd-sweep")


def run(options: argparse.Namespace) -> int:
    out = options.out or Path("pathsgd-sweep")
    setup = setup_of(options, StudySetup)
    assert isinstance(setup, StudySetup)
    choices = sweep(study_of(options), out, setup, progress=TerminalProgress(options.quiet))
    print(f"\n{tabulate_choices(choices)}\n\nrecorded in {out}")
    return 0 if all(choice.best for choice in choices) else 1
