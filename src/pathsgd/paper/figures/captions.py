"""What is said under each figure."""

from __future__ import annotations

from pathsgd.paper.figures.curves import first_part
from pathsgd.paper.figures.figure1 import compared
from pathsgd.paper.figures.style import title_of
from pathsgd.paper.optimizers import find_method
from pathsgd.paper.records.study_results import StudyResults


def caption(name: str, results: StudyResults) -> str:
    """Of ``figure1`` to ``figure5``; nothing for other names."""
    if name == "figure1":
        return _figure1(results)
    if name not in ("figure2", "figure3", "figure4", "figure5"):
        return ""
    dropout = name in ("figure3", "figure5")
    epochs = results.study.epochs
    last = first_part(epochs) if name in ("figure2", "figure3") else epochs
    part = f"the first {last} of {epochs} epochs" if last < epochs else f"all {epochs} epochs"
    said = [
        f"Figure {name[-1]}. Learning curves with{'' if dropout else 'out'} dropout, {part}: cross-entropy, "
        "training error and test error after each epoch. Those in training are what each batch showed before "
        "it was trained on, averaged over the epoch"
        + (", with units dropped; the test error is that of the whole network." if dropout else ".")
    ]
    if results.study.repeats > 1:
        said.append(
            f"Lines are means of {results.study.repeats} runs, bands reach from the lowest to the highest."
        )
    said += _about_unbalanced(results, dropout)
    said.append(
        "The vertical range is that of the balanced runs; curves beyond it are named above the panel, with "
        "the values they end at, or counted there if they are many."
    )
    if any(run.status == "diverged" for runs in results.finals.values() for run in runs):
        said.append("A cross marks where a run diverged; repeats that outlive another go on as thin lines.")
    return " ".join(said)


def _about_unbalanced(results: StudyResults, dropout: bool) -> list[str]:
    study = results.study
    if not {"balanced", "unbalanced"} <= set(study.inits):
        return []
    said = []
    invariant = [find_method(name).label for name in study.methods if find_method(name).invariant]
    if invariant:
        names = " and ".join(invariant)
        said.append(
            f"The unbalanced runs of {names} are drawn as open marks, on the line of the balanced ones."
        )
    if dropout and len(invariant) < len(study.methods):
        said.append(
            "The paper left out the unbalanced runs with dropout as very poor; here they are thin dashed "
            "lines without a band."
        )
    return said


def _figure1(results: StudyResults) -> str:
    pair = compared(results)
    if pair is None:
        first = (
            "(a) Nothing to show: it takes a method that is not invariant, from both initialisations, each "
            "with a step size that ended well."
        )
    else:
        name, where = find_method(pair[0].method).label, title_of(pair[0].dataset)
        first = (
            f"(a) The training loss of {name} on {where} from the balanced initialisation and from the same "
            "weights unbalanced by rescaling, each with the step size chosen for it."
        )
    return (
        f"Figure 1. {first} (b) One step on a chain of one hidden unit: SGD hardly moves the large weight "
        "and blows up the small one; Path-SGD moves both in proportion. In italics: by how much. (c) Two "
        "networks that compute the same function: after one step of SGD they do not any more, after one of "
        "Path-SGD they do. In bold: the outputs. All numbers of (b) and (c) are computed with the "
        "library; thresholds are zero."
    )
