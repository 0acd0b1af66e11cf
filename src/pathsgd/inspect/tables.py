"""What was measured as tables to read and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pathsgd.console.tables import align
from pathsgd.graph.path_graph import PathGraph
from pathsgd.inspect.measure import Layer, Measures, Spread

LEGEND = """\
norm: of the weights into a unit; mu is the largest. imbalance: log2 of what a unit has been rescaled by, seen
from the balanced network; 0 is balanced, - is a layer without units that can be rescaled."""


def text(measures: Measures) -> str:
    """The short table of the network, then the table of its layers."""
    return "\n".join([*_network(measures), "", *_layers(measures.layers)])


def _network(measures: Measures) -> list[str]:
    p = f"{measures.p:g}"
    rows = []
    for region, log_phi in measures.log_phi.items():
        which = f" of region {region}" if len(measures.log_phi) > 1 or region else ""
        phi = _phi(log_phi)
        in_floats = "beyond floats" if phi is None else f"phi_{p} = {phi:.6g}"
        rows.append((f"log phi_{p}{which}", f"{log_phi:.6g}", in_floats))
    if not rows:
        rows.append((f"log phi_{p}", "-", "no parameter lies on a path"))
    at = next((layer for layer in measures.layers if _largest(layer) == measures.mu), None)
    rows.append((f"mu_{{{p},inf}}", f"{measures.mu:.6g}", f"at {_title(at)}" if at else ""))
    rows.append(
        (f"mu_{{{p},inf}} balanced", f"{measures.mu_balanced:.6g}", "the least that rescaling can make it")
    )
    if measures.ratio is not None:
        rows.append(("ratio", f"{measures.ratio:.6g}", "1 where no rescaling makes mu smaller"))
    return align(rows, "<<<")


def _layers(layers: Sequence[Layer]) -> list[str]:
    if not layers:
        return ["No layer has weights on paths."]
    several = len({layer.region for layer in layers}) > 1
    head = ("layer", "region", "units", "norm: min", "median", "max", "imbalance: min", "median", "max")
    rows = [head]
    for layer in layers:
        units = str(layer.units)
        if 0 < layer.rescalable < layer.units:
            units = f"{layer.rescalable} of {layer.units}"
        region = "-" if layer.region is None else str(layer.region)
        norm, imbalance = _cells(layer.norm, _norm), _cells(layer.imbalance, octaves)
        rows.append((_title(layer), region, units, *norm, *imbalance))
    if not several:
        rows = [(row[0], *row[2:]) for row in rows]  # type: ignore[misc]
    lines = align(rows, "<" + ">" * (len(rows[0]) - 1))
    lines.insert(1, "-" * max(map(len, lines)))
    return [*lines, "", LEGEND]


def _norm(x: float) -> str:
    return f"{x:.4g}"


def octaves(x: float) -> str:
    """
    >>> octaves(5.0), octaves(-0.25), octaves(-1e-7)
    ('+5.00', '-0.25', '0')
    """
    shown = f"{x:+.2f}"
    return "0" if float(shown) == 0 else shown


def _cells(spread: Spread | None, shown: Any) -> tuple[str, str, str]:
    if spread is None:
        return "-", "-", "-"
    return shown(spread.smallest), shown(spread.median), shown(spread.largest)


def _title(layer: Layer) -> str:
    """Any one of the owners names the units; two are enough to see that there are several."""
    more = len(layer.owners) - 2
    return " + ".join(layer.owners[:2]) + (f" + {more} more" if more > 0 else "")


def _largest(layer: Layer) -> float:
    return layer.norm.largest if layer.norm is not None else 0.0


def _phi(log_phi: float) -> float | None:
    """phi itself, where it is a normal number of fp64."""
    if log_phi == -math.inf:
        return 0.0
    return math.exp(log_phi) if -708 < log_phi < 709 else None


def as_json(graph: PathGraph, measures: Measures) -> dict[str, Any]:
    """Everything the report and the tables say. The logarithm of a phi of 0 is null, as is a phi beyond
    floats."""
    shown = {region: k for k, region in enumerate(graph.parameter_regions())}
    parameters = [
        {
            "name": info.name,
            "aliases": list(info.aliases),
            "shape": list(info.shape),
            "trainable": info.trainable,
            "roles": list(info.roles),
            "regions": [shown[region] for region in info.regions],
            "path_normalised": info.normalised,
            "reason": info.reason,
        }
        for info in graph.parameters.values()
    ]
    ends = dict.fromkeys((shown.get(graph.regions[node]), at, why) for node, at, why in graph.boundaries)
    return {
        "model": graph.model,
        "p": measures.p if math.isfinite(measures.p) else "inf",
        "regions": len(shown),
        "parameters": parameters,
        "ends": [{"region": region, "at": at, "reason": why} for region, at, why in ends],
        "notes": list(graph.notes),
        "phi": [
            {"region": k, "log_phi": x if math.isfinite(x) else None, "phi": _phi(x)}
            for k, x in measures.log_phi.items()
        ],
        "mu": measures.mu,
        "mu_balanced": measures.mu_balanced,
        "ratio": measures.ratio,
        "layers": [asdict(layer) for layer in measures.layers],
    }
