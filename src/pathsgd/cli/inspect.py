"""``pathsgd inspect``: prints the path graph, path norm and imbalance of a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pathsgd import Comparison, Imbalance, Inspection, PathError, imbalance, inspect, path_norm
from pathsgd.cli.user_model import load_model, make_parser, trace_model

ABOUT = """\
Prints a model as the library sees it. The model is not changed.

the graph    what pathsgd.trace finds: which parameters lie on paths and which fall back to gamma = 1,
             and where and why a region of paths ends
log phi_p    the natural logarithm of the path norm, finite at any depth; one for each region. Rescaling
             inside a region does not change it
mu_{p,p}     the l_p norm of all weights, now and after pathsgd.balance(model, x, p, p). Their ratio is 1
             for a balanced network, and may be less where gains of norms are small
the layers   named as pathsgd.rescale names them: the number of units, the norm of the weights into them,
             and their imbalance: +5 means that the weights into a unit are 2^5 times too large, and those
             out of it 2^5 times too small

--figure     draws for each layer the imbalance of its units, those that are dead, and what rounding its
             weights to 8 and to 4 bits loses, now and after pathsgd.balance(model, x, p=4, q=4)

Importing a module runs the code in it, and reading a whole model from a file can, so inspect what you
trust. State dicts (--weights) are read by torch.load(weights_only=True), which runs none.

examples:
  pathsgd inspect mypkg.models:resnet --input-shape 1,3,32,32
  pathsgd inspect train.py:Net --arguments '{"width": 64}' --input-shape 1,784 --weights net.pt
  pathsgd inspect net.pt2 --trust --figure net.png
  pathsgd inspect transformers:GPT2Model --arguments '{"n_layer": 2}' --input-shape 1,16 --input-dtype int64
"""
LEGEND = """\
norm: of the weights into a unit. imbalance: log2 of what a unit has been rescaled by, seen from what
pathsgd.balance makes; 0 is balanced, - is a layer without units that can be rescaled."""


def main(arguments: Sequence[str]) -> None:
    options = make_parser(ABOUT).parse_args(arguments)
    if options.figure is not None:
        check_figure(options.figure)
    with contextlib.redirect_stdout(sys.stderr):  # for what the user's code prints
        model, example = load_model(options)
        graph = trace_model(options, model, example)
    print(graph, end="\n\n", flush=True)
    measured = imbalance(model, graph, options.p, options.p)
    regions = range(len(graph.parameter_regions()))
    log_phi = {k: path_norm(model, graph, options.p, log=True, region=k).item() for k in regions}
    print("\n".join([*_network_table(measured, log_phi), "", *_layer_table(measured)]))
    if options.figure is not None:
        inspection = inspect(model, graph)
        print("", inspection, save_figure(inspection, options.figure), sep="\n")


def check_figure(file: Path) -> None:
    """Raises at once what would be raised when a figure is saved."""
    if find_spec("matplotlib") is None:
        raise PathError("--figure needs matplotlib: pip install matplotlib")
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PathError(f"--figure {file}: the file has to end in .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise PathError(f"--figure {file}: there is no folder {file.parent}")


def save_figure(drawable: Inspection | Comparison, file: Path) -> str:
    """Writes its figure, and returns a line that says where."""
    drawable.draw().savefig(file, dpi=150)
    return f"figure: {file}"


def align(rows: Sequence[Sequence[str]], sides: str, rule: bool = False) -> list[str]:
    """Returns rows as lines, each column aligned to its side; with a rule below the first row.

    >>> print("\\n".join(align([("net", "us"), ("small", "7")], "<>", rule=True)))
    net    us
    ---------
    small   7
    """
    widths = [max(len(row[k]) for row in rows) for k in range(len(sides))]
    lines = [
        "  ".join(f"{cell:{side}{n}}" for cell, side, n in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]] if rule else lines


def _network_table(measured: Imbalance, log_phi: dict[int, float]) -> list[str]:
    phi_p, mu = f"phi_{measured.p:g}", f"mu_{{{measured.p:g},{measured.q:g}}}"
    rows = []
    for region, logarithm in log_phi.items():
        which = f" of region {region}" if len(log_phi) > 1 else ""
        rows.append((f"log {phi_p}{which}", f"{logarithm:.6g}", ""))
    if not rows:
        rows.append((f"log {phi_p}", "-", "no parameter lies on a path"))
    rows.append((mu, f"{measured.mu:.6g}", ""))
    rows.append((f"{mu} balanced", f"{measured.mu_balanced:.6g}", ""))
    if measured.ratio is not None:
        rows.append(("ratio", f"{measured.ratio:.6g}", "1 if balanced"))
    return align(rows, "<<<")


def _layer_table(measured: Imbalance) -> list[str]:
    if not measured.layers:
        return ["No layer has weights on paths."]
    rows = [("layer", "region", "units", "norm: min", "median", "max", "imbalance: min", "median", "max")]
    for layer in measured.layers:
        units = str(layer.units)
        if 0 < layer.rescalable < layer.units:
            units = f"{layer.rescalable} of {layer.units}"
        region = "-" if layer.region is None else str(layer.region)
        norm = _spread_cells(layer.norm, lambda x: f"{x:.4g}")
        octaves = _spread_cells(layer.imbalance, format_octaves)
        rows.append((_title(layer.owners), region, units, *norm, *octaves))
    return [*align(rows, "<" + ">" * 8, rule=True), "", LEGEND]


def format_octaves(x: float) -> str:
    """
    >>> format_octaves(5.0), format_octaves(-0.25), format_octaves(-1e-7)
    ('+5.00', '-0.25', '0')
    """
    text = f"{x:+.2f}"
    return "0" if float(text) == 0 else text


def _spread_cells(spread: Any, text: Callable[[float], str]) -> tuple[str, str, str]:
    if spread is None:
        return "-", "-", "-"
    return text(spread.smallest), text(spread.median), text(spread.largest)


def _title(owners: tuple[str, ...]) -> str:
    """Any one of the owners names the units; two are enough to see that there are several."""
    more = len(owners) - 2
    return " + ".join(owners[:2]) + (f" + {more} more" if more > 0 else "")
