"""``pathsgd reproduce``: the paper's whole study."""

from __future__ import annotations

import argparse
from pathlib import Path

from pathsgd.paper import StudySetup, TerminalProgress, reproduce
from pathsgd.paper.commands.common import add_study, add_study_place, setup_of, study_of
from pathsgd.paper.commands.figures import conclude

HELP = "the paper's whole study: small by default, or at full size"
DESCRIPTION = """\
Runs the paper's experiments: for every data set, method, initialisation and dropout it chooses a
step size on validation points, then trains on all the training data, evaluating on the test set
after every epoch. It ends with a table, the paper's seven claims each held, not held or not
tested with its numbers, the figures and a report.

Without arguments it takes scikit-learn's digits and two hidden layers of 256 units: a few minutes
on a laptop. `--preset paper` is the full size, on MNIST, CIFAR-10, CIFAR-100 and SVHN, which
wants a GPU. Every option below changes the preset.

Interrupted by Ctrl-C or worse, the same command goes on where it stopped, and on a CPU ends with
the same numbers to the last bit. Runs are found by their configuration: a changed study keeps
what it has in common with the old.

examples:
  pathsgd reproduce
  pathsgd reproduce --methods sgd adam path-sgd path-adam --repeats 1
  pathsgd reproduce --preset paper --dataset mnist cifar10 --device cuda --data-dir ~/data
  pathsgd reproduce --net conv --hidden 16 32 64 --dropout 0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_study(parser)
    add_study_place(parser, "pathsgd-PRESET")


def run(options: argparse.Namespace) -> int:
    out = options.out or Path(f"pathsgd-{options.preset}")
    setup = setup_of(options, StudySetup)
    assert isinstance(setup, StudySetup)
    conclude(reproduce(study_of(options), out, setup, progress=TerminalProgress(options.quiet)))
    return 0
