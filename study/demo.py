"""``python -m study demo``: what rescaling does to training, in about a minute."""

import math
import os
import shutil
import sys
import webbrowser
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pathsgd import BalancedMuon, Comparison, PathGraph, PathSGD, balance, compare
from study.config import Run
from study.figures import poor_updates
from study.sources import load
from study.training import make_initial_network

STEPS, BATCH, VALIDATION = 300, 100, 300
ALIKE = 0.05
"""How far the losses at the end from both starts are apart, as a part, where a method trains both alike."""


def _torch(kind: Any, *rates: float, balanced: bool = False) -> tuple[Any, tuple[float, ...]]:
    def make(model: nn.Module, graph: PathGraph, rate: float) -> torch.optim.Optimizer:
        if balanced:
            balance(model, graph)
        return kind(model.parameters(), rate)

    return make, rates


METHODS = {
    "SGD": _torch(torch.optim.SGD, 0.1, 0.3, 1.0),
    "AdaGrad": _torch(torch.optim.Adagrad, 0.01, 0.03, 0.1),
    "AdamW": _torch(torch.optim.AdamW, 1e-3, 3e-3, 1e-2),
    "Path-SGD": (lambda model, graph, rate: PathSGD(model, graph, rate), (0.01, 0.03, 0.1)),
    "balance + AdamW": _torch(torch.optim.AdamW, 1e-3, 3e-3, 1e-2, balanced=True),
    "BalancedMuon": (lambda model, graph, rate: BalancedMuon(model, graph), (None,)),
}


def show_demo(out: Path) -> None:
    """Prints the story, and draws its figure into the folder."""
    print(describe_one_step(), end="\n\n", flush=True)
    comparison = train_digits()
    print(describe_training(comparison), end="\n\n")
    out.mkdir(parents=True, exist_ok=True)
    figure = out / "two-starts.png"
    comparison.draw().savefig(figure, dpi=130)
    print(f"figure: {figure}\n\n{describe_next()}")
    if sys.stdout.isatty() and _has_screen():
        webbrowser.open(figure.resolve().as_uri())


def describe_one_step() -> str:
    _, sgd, path = poor_updates().gaps
    return (
        "Two networks compute the same function: one is a rescaled copy (the paper's Figure 1 (c)).\n"
        f"One step later their outputs differ by {sgd:.4g} with SGD, by {round(path, 9):g} with Path-SGD."
    )


def train_digits() -> Comparison:
    """Trains the small study's network on digits, as it is made and from a rescaled copy."""
    data = load("digits")
    x, y = data.scaled(data.train_x), data.train_y
    train = torch.utils.data.TensorDataset(x[VALIDATION:], y[VALIDATION:])
    batches = torch.utils.data.DataLoader(train, BATCH, shuffle=True, drop_last=True)
    valid = [(x[:VALIDATION], y[:VALIDATION])]
    model, _ = make_initial_network(Run(hidden=(256, 256)), x.shape[1], data.classes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for so small a network
    try:
        return compare(
            model, batches, valid, methods=METHODS, steps=STEPS, rescaled=True, progress=sys.stderr.isatty()
        )
    finally:
        torch.set_num_threads(threads)


def describe_training(comparison: Comparison) -> str:
    lines = [
        f"Digits, {STEPS} steps, validation loss at the best of three rates (BalancedMuon: at its default):",
        "",
        f"  {'':16}{'as made':>9}  {'rescaled copy':>13}",
    ]
    alike = []
    for method in comparison.methods:
        loss, other = (comparison.find(method, rescaled).loss for rescaled in (False, True))
        if abs(other - loss) <= ALIKE * loss:
            alike.append(method)
        lines.append(f"  {method:16}{loss:>9.3f}  {other if other < 100 else math.inf:>13.3f}")
    differ = [method for method in comparison.methods if method not in alike]
    return "\n".join(
        [
            *lines,
            "",
            f"The same from both starts, within {ALIKE:.0%}: {', '.join(alike) or 'none'}.",
            f"Not the same: {', '.join(differ) or 'none'}.",
        ]
    )


def describe_next() -> str:
    program = "pathsgd"
    if shutil.which(program) is None:  # as in the environment that `make demo` makes
        program = os.path.relpath(Path(sys.executable).parent / program)
    return (
        f"next:  {program} compare my_model.py:make   AdamW and BalancedMuon on a model of yours\n"
        f"       {program} inspect my_model.py:Net    how unbalanced it is\n"
        "       make study   the paper's study, small: two to four minutes"
    )


def _has_screen() -> bool:
    return sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
