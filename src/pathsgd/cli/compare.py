"""``pathsgd compare``: trains a model of the user's by AdamW, ``balance`` and AdamW, and BalancedMuon."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pathsgd import PathError, compare
from pathsgd.cli.inspect import check_figure, save_figure
from pathsgd.cli.user_model import describe, import_target

ABOUT = """\
Trains copies of a model, all from the same start, on the same batches, with 5% warm-up and a cosine to zero:

AdamW            at three rates, or those of --lr, and up to three more where the best is at an end
balance + AdamW  likewise, on the balanced model
BalancedMuon     at its default

TARGET is a function without arguments that returns the model, its batches and, if there are any, batches to
validate on, such as two DataLoaders. A batch is a dict, for model(**batch).loss, or a pair x, y, for the
cross-entropy or the squared error between model(x) and y; a fourth thing returned is another loss, a function
of the model and a batch. A model on a GPU is trained there. For example:

    def make():
        return Net(), DataLoader(train, 64, shuffle=True), DataLoader(valid, 500)

Each run is validated twenty times. It prints the loss at the end and the time of a step, the best rate first;
--figure draws the curves, and needs matplotlib.

examples:
  pathsgd compare my_model.py:make
  pathsgd compare my_model.py:make --steps 1000 --rescaled --figure curves.png
"""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="pathsgd compare", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="package.module:name or path/to/file.py:name")
    add("--steps", type=int, default=200, help="of each run, by default 200")
    add("--lr", type=float, nargs="+", default=(3e-4, 1e-3, 3e-3), metavar="RATE",
        help="rates of AdamW, by default 3e-4 1e-3 3e-3")  # fmt: skip
    add("--rescaled", action="store_true", help="also train a copy whose units are rescaled at random")
    add("--seed", type=int, default=0, help="of the start, the batches and the rescaling")
    add("--figure", type=Path, metavar="FILE", help="draw the curves into this file, a PNG, SVG or PDF")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    if options.figure is not None:
        check_figure(options.figure)
    torch.manual_seed(options.seed)
    comparison = compare(
        *_make(options.target), steps=options.steps, lr=options.lr, rescaled=options.rescaled,
        seed=options.seed, progress=True,
    )  # fmt: skip
    print(comparison)
    if options.figure is not None:
        print(save_figure(comparison, options.figure))


def _make(text: str) -> tuple[Any, ...]:
    """What the user's function returns, checked to be what ``compare`` takes."""
    target = import_target(text)
    try:
        made = target()
    except (Exception, SystemExit) as error:
        raise PathError(f"{text} raised {describe(error)}") from error
    if not (isinstance(made, tuple) and 2 <= len(made) <= 4 and isinstance(made[0], nn.Module)):
        raise PathError(
            f"{text} returned a {type(made).__name__}: return a tuple of the model, its batches and, if any, "
            "batches to validate on"
        )
    return made
