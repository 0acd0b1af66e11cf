"""``pathsgd sweep``: step sizes only."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from pathsgd.paper import TerminalProgress, sweep, tabulate_choices
from pathsgd.paper.commands.options import StudyCommand, parse_study


@dataclass(frozen=True)
class Sweep(StudyCommand):
    """Chooses step sizes on validation points: the first half of `pathsgd reproduce`.

    For every data set, method, initialisation and dropout it trains with every step size on part of the
    training data, and chooses the one with the lowest validation error, of equals the one that reaches it in
    fewer epochs. Runs that diverge are recorded as diverged. A run that has not learned anything after a
    third of its epochs is stopped, and resumed unless another is clearly ahead. The results go to
    pathsgd-sweep, or to --out; the exit code is 1 if some cell has no step size that ended well.

    examples:
      pathsgd sweep --methods sgd path-sgd --step-sizes 1 0.3 0.1 0.03 0.01 --inits balanced --dropouts 0
      pathsgd sweep --dataset mine=features.npz --methods path-sgd --json
    """

    json: bool = False
    """print JSON instead of a table, and no progress"""


def main(arguments: Sequence[str]) -> int:
    options = parse_study(Sweep, arguments, "sweep")
    out = options.out or Path("pathsgd-sweep")
    progress = TerminalProgress(options.quiet or options.json)
    # Ray prints a line when a worker dies, which must not end up in the JSON.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        choices = sweep(options.study.to_study(), out, options.setup, progress=progress)
    if options.json:
        print(json.dumps({"out": str(out), "choices": [choice.to_json() for choice in choices]}, indent=1))
    else:
        print(f"\n{tabulate_choices(choices)}\n\nrecorded in {out}")
    return 0 if all(choice.best for choice in choices) else 1
