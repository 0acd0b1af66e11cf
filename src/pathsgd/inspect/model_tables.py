"""The path graph and the imbalance of a model, as tables and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pathsgd import Imbalance, PathGraph
from pathsgd.console.tables import align

LEGEND = """\
norm: of the weights into a unit; mu is the largest. imbalance: log2 of what a unit has been rescaled by, seen
from the balanced network; 0 is balanced, - is a layer without units that can be rescaled."""


def format_tables(found: Imbalance) -> str:
    """The table of the network, then the table of its layers."""
    return "\n".join([*_network_table(found), "", *_layer_table(found)])


def _network_table(found: Imbalance) -> list[str]:
    phi_p, mu = f"phi_{found.p:g}", f"mu_{{{found.p:g},inf}}"
    rows = []
    for region, log_phi in found.log_phi.items():
        which = f" of region {region}" if len(found.log_phi) > 1 or region else ""
        phi = _phi(log_phi)
        in_floats = "beyond floats" if phi is None else f"{phi_p} = {phi:.6g}"
        rows.append((f"log {phi_p}{which}", f"{log_phi:.6g}", in_floats))
    if not rows:
        rows.append((f"log {phi_p}", "-", "no parameter lies on a path"))
    at = next((layer for layer in found.layers if layer.norm and layer.norm.largest == found.mu), None)
    rows.append((mu, f"{found.mu:.6g}", f"at {_title(at.owners)}" if at else ""))
    rows.append((f"{mu} balanced", f"{found.mu_balanced:.6g}", "the least that rescaling can make it"))
    if found.ratio is not None:
        rows.append(("ratio", f"{found.ratio:.6g}", "1 where no rescaling makes mu smaller"))
    return align(rows, "<<<")


def _layer_table(found: Imbalance) -> list[str]:
    if not found.layers:
        return ["No layer has weights on paths."]
    rows = [("layer", "region", "units", "norm: min", "median", "max", "imbalance: min", "median", "max")]
    for layer in found.layers:
        units = str(layer.units)
        if 0 < layer.rescalable < layer.units:
            units = f"{layer.rescalable} of {layer.units}"
        region = "-" if layer.region is None else str(layer.region)
        norm = _cells(layer.norm, lambda x: f"{x:.4g}")
        rows.append((_title(layer.owners), region, units, *norm, *_cells(layer.imbalance, format_octaves)))
    columns = range(9) if len({layer.region for layer in found.layers}) > 1 else (0, *range(2, 9))
    table = [[row[k] for k in columns] for row in rows]
    return [*align(table, "<" + ">" * (len(columns) - 1), rule=True), "", LEGEND]


def format_octaves(x: float) -> str:
    """
    >>> format_octaves(5.0), format_octaves(-0.25), format_octaves(-1e-7)
    ('+5.00', '-0.25', '0')
    """
    text = f"{x:+.2f}"
    return "0" if float(text) == 0 else text


def _cells(spread: Any, text: Callable[[float], str]) -> tuple[str, str, str]:
    """Smallest, median, largest."""
    if spread is None:
        return "-", "-", "-"
    return text(spread.smallest), text(spread.median), text(spread.largest)


def _title(owners: tuple[str, ...]) -> str:
    """Any one of the owners names the units; two are enough to see that there are several."""
    more = len(owners) - 2
    return " + ".join(owners[:2]) + (f" + {more} more" if more > 0 else "")


def _phi(log_phi: float) -> float | None:
    """phi itself, where it is a normal number of fp64."""
    if log_phi == -math.inf:
        return 0.0
    return math.exp(log_phi) if -708 < log_phi < 709 else None


def to_json(graph: PathGraph, found: Imbalance) -> dict[str, Any]:
    """Everything the report and the tables say. The logarithm of a phi of 0 is null, as is a phi beyond
    floats."""
    numbers = {region: k for k, region in enumerate(graph.parameter_regions())}
    parameters = [
        {
            **asdict(info),
            "status": info.status.value,
            "path_normalised": info.normalised,
            "regions": [numbers[region] for region in info.regions],
        }
        for info in graph.parameters.values()
    ]
    ends = dict.fromkeys((numbers.get(graph.regions[node]), at, why) for node, at, why in graph.boundaries)
    return {
        "model": graph.model,
        "p": found.p if math.isfinite(found.p) else "inf",
        "regions": len(numbers),
        "parameters": parameters,
        "ends": [{"region": region, "at": at, "reason": why} for region, at, why in ends],
        "notes": list(graph.notes),
        "phi": [
            {"region": k, "log_phi": x if math.isfinite(x) else None, "phi": _phi(x)}
            for k, x in found.log_phi.items()
        ],
        "mu": found.mu,
        "mu_balanced": found.mu_balanced,
        "ratio": found.ratio,
        "layers": [asdict(layer) for layer in found.layers],
    }
