"""``pathsgd reproduce``: the paper's whole study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathsgd.paper import TerminalProgress, reproduce
from pathsgd.paper.commands.figures import print_summary
from pathsgd.paper.commands.options import StudyCommand, parse_study


@dataclass(frozen=True)
class Reproduce(StudyCommand):
    """Runs the paper's experiments.

    For every data set, method, initialisation and dropout it chooses a step size on validation points, then
    trains on all the training data, evaluating on the test set after every epoch. It ends with a table, the
    paper's seven claims with a verdict each (agrees, disagrees, cannot be told from these runs, not tested)
    and every comparison behind it, the figures and a report. From one start (--inits balanced) the claims
    cannot be judged: it says instead which method is first.

    Without arguments it takes scikit-learn's digits and two hidden layers of 256 units: a few minutes on a
    laptop. `--preset paper` is the full size, on MNIST, CIFAR-10, CIFAR-100 and SVHN, for a GPU.

    After Ctrl-C or a crash the same command resumes, and on a CPU ends with the same numbers to the last bit.
    Runs are found by their configuration: a changed study keeps what it has in common with the old. The
    results go to pathsgd-PRESET, or to --out.

    examples:
      pathsgd reproduce
      pathsgd reproduce --methods sgd adam path-sgd path-adam --repeats 1
      pathsgd reproduce --preset paper --dataset mnist cifar10 --device cuda --data-dir ~/data
      pathsgd reproduce --net conv --hidden 16 32 64 --dropout 0
      pathsgd reproduce --preset paper --executor ray --address auto
    """


def main(arguments: Sequence[str]) -> int:
    options = parse_study(Reproduce, arguments, "reproduce")
    out = options.out or Path(f"pathsgd-{options.preset}")
    progress = TerminalProgress(options.quiet)
    print_summary(reproduce(options.study.to_study(), out, options.setup, progress=progress))
    return 0
