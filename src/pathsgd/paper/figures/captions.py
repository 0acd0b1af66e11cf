"""The captions of the figures."""

from __future__ import annotations

from pathsgd.paper.figures.curves import first_part
from pathsgd.paper.figures.figure1 import find_pair
from pathsgd.paper.figures.style import title_of
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.records.study_results import StudyResults

LEARNING_CURVES = (
    "Cross-entropy, training error and test error after each epoch; those in training are measured on "
    "each batch before its step, with units dropped where there is dropout. Lines are means over the "
    "repeats, bands reach from the lowest to the highest. Unbalanced runs of invariant methods are open "
    "marks on the line of the balanced ones. The vertical range is that of the balanced runs; curves "
    "beyond it are named above the panel with the values they end at, or counted. A cross marks where a "
    "run diverged; the other runs go on as thin lines, one by one."
)
EXAMPLES = (
    "(b) One step on a chain of one hidden unit: SGD hardly moves the large weight and blows up the small "
    "one; Path-SGD moves both in proportion. In italics: the change. (c) Two networks that compute the "
    "same function: after one step of SGD they do not any more, after one of Path-SGD they do. In bold: "
    "the outputs. (b) and (c) are computed with the library, without biases."
)


def caption(name: str, results: StudyResults) -> str:
    """Of ``figure1`` to ``figure5``; nothing for other names."""
    if name == "figure1":
        pair = find_pair(results)
        where = pair and f"{METHODS[pair[0].method].label} on {title_of(pair[0].dataset)}"
        first = f"The training loss of {where}, balanced and unbalanced" if pair else "Nothing to show"
        return f"Figure 1: what an unbalanced start does to SGD. (a) {first}. {EXAMPLES}"
    if name not in ("figure2", "figure3", "figure4", "figure5"):
        return ""
    epochs = results.study.epochs
    last = first_part(epochs) if name in ("figure2", "figure3") else epochs
    part = f"the first {last} of {epochs}" if last < epochs else f"all {last}"
    dropout = "with" if name in ("figure3", "figure5") else "without"
    return f"Figure {name[-1]}: learning curves {dropout} dropout, {part} epochs. {LEARNING_CURVES}"
