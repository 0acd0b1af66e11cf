"""The captions of the figures."""

from __future__ import annotations

from pathsgd.paper.figures.curves import first_part
from pathsgd.paper.figures.figure1 import find_pair
from pathsgd.paper.figures.style import title_of
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.records.study_results import StudyResults


def caption(name: str, results: StudyResults) -> str:
    """Of ``figure1`` to ``figure5``; nothing for other names."""
    if name == "figure1":
        return _caption_figure1(results)
    if name not in ("figure2", "figure3", "figure4", "figure5"):
        return ""
    study, dropout = results.study, name in ("figure3", "figure5")
    last = first_part(study.epochs) if name in ("figure2", "figure3") else study.epochs
    part = f"the first {last} of {study.epochs}" if last < study.epochs else f"all {last}"
    invariant = [METHODS[method].label for method in study.methods if METHODS[method].invariant]
    both_starts = {"balanced", "unbalanced"} <= set(study.inits)
    diverged = any(record.status == "diverged" for records in results.finals.values() for record in records)
    sentences = {
        f"Figure {name[-1]}. Learning curves with{'' if dropout else 'out'} dropout, {part} epochs: "
        "cross-entropy, training error and test error after each epoch. Those in training are measured on "
        "each batch before its step and averaged over the epoch"
        + (", with units dropped; the test error is that of the whole network." if dropout else "."): True,
        f"Lines are means of {study.repeats} runs, bands reach from the lowest to the highest.": (
            study.repeats > 1
        ),
        f"The unbalanced runs of {' and '.join(invariant)} are drawn as open marks, on the line of the "
        "balanced ones.": both_starts and bool(invariant),
        "The paper left out the unbalanced runs with dropout as very poor; here they are thin dashed lines "
        "without a band.": both_starts and dropout and len(invariant) < len(study.methods),
        "The vertical range is that of the balanced runs; curves beyond it are named above the panel, with "
        "the values they end at, or counted there if they are many.": True,
        "A cross marks where a run diverged; repeats that last longer go on as thin lines.": diverged,
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)


def _caption_figure1(results: StudyResults) -> str:
    pair = find_pair(results)
    if pair is None:
        first = (
            "Nothing to show: it takes a method that is not invariant, from both initialisations, each with "
            "a step size that ended well."
        )
    else:
        first = (
            f"The training loss of {METHODS[pair[0].method].label} on {title_of(pair[0].dataset)} from the "
            "balanced initialisation and from the same weights unbalanced by rescaling, each with the step "
            "size chosen for it."
        )
    return (
        f"Figure 1. (a) {first} (b) One step on a chain of one hidden unit: SGD hardly moves the large "
        "weight and blows up the small one; Path-SGD moves both in proportion. In italics: the change. (c) "
        "Two networks that compute the same function: after one step of SGD they do not any more, after one "
        "of Path-SGD they do. In bold: the outputs. (b) and (c) are computed with the library, without "
        "biases."
    )
