"""``pathsgd sweep``: step sizes only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathsgd.paper.commands.common import loaded, place_of, reporting
from pathsgd.paper.commands.options import StudyCommand, parse_study
from pathsgd.paper.experiment.conduct import record_head, search
from pathsgd.paper.tables import choices_table, printed


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
    study, setup = options.study.study(), options.setup
    out = options.out or Path("pathsgd-sweep")
    datasets = loaded(study.datasets, setup)
    place = place_of(setup, datasets, study, study.methods, out)
    with reporting(setup, options.quiet or options.json, out) as reporter:
        infos = record_head(study, datasets, place)
        choices = search(study, datasets, infos, place, reporter)
    if options.json:
        print(json.dumps({"out": str(out), "choices": [choice.to_json() for choice in choices]}, indent=1))
    else:
        print(f"\n{printed(choices_table(choices))}\n\nrecorded in {out}")
    return 0 if all(choice.best for choice in choices) else 1
