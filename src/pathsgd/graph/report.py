"""The report a person reads: what is path-normalised, what is not, and why."""

from __future__ import annotations

import math
from fractions import Fraction

from pathsgd.graph.path_graph import ParameterInfo, PathGraph


def report(graph: PathGraph) -> str:
    """One line per parameter, then the places where a region ends."""
    rows = [("parameter", "shape", "role", "region", "path-normalised")]
    shown = {region: k for k, region in enumerate(graph.parameter_regions())}
    for info in graph.parameters.values():
        rows.append(
            (
                info.name + "".join(f" = {alias}" for alias in info.aliases),
                "x".join(map(str, info.shape)) or "scalar",
                ", ".join(info.roles) or "-",
                ", ".join(str(shown[region]) for region in info.regions) or "-",
                _verdict(info),
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    counted = list(graph.parameters.values())
    normalised = sum(info.normalised for info in counted)
    lines.insert(
        0,
        f"PathGraph of {graph.model}: {normalised} of {len(counted)} parameters path-normalised, "
        f"{len(shown)} region{'s' * (len(shown) != 1)}",
    )
    ends = _inner_ends(graph, shown)
    if ends:
        lines += ["", "Regions end where the network is not positively homogeneous:"]
        lines += [f"  {line}" for line in ends]
    lines += ["", *(f"Note: {note}" for note in graph.notes)] if graph.notes else []
    return "\n".join(lines)


def _verdict(info: ParameterInfo) -> str:
    frozen = "" if info.trainable else " (frozen)"
    if not info.normalised:
        return f"no{frozen}: {info.reason}"
    parts = [
        f", {_share(info, entries)}{what}"
        for entries, what in ((info.alone, "alone"), (info.with_scales_only, "with per-channel weights only"))
        if entries
    ]
    return f"yes{frozen}{''.join(parts)}"


def _share(info: ParameterInfo, entries: int) -> str:
    """How much of a parameter, in rows where it has some; nothing is said of all."""
    share = Fraction(entries, math.prod(info.shape))
    return "" if share == 1 else f"{share} of its {'rows' if len(info.shape) > 1 else 'entries'} "


def _inner_ends(graph: PathGraph, shown: dict[int, int]) -> list[str]:
    """One line per region and reason, with the modules in which it happens."""
    places: dict[tuple[int, str], dict[str, None]] = {}
    for node, where, reason in graph.boundaries:
        region = graph.regions[node]
        if region in shown:
            places.setdefault((shown[region], reason), {})[where] = None
    lines = []
    for (region, reason), found in sorted(places.items()):
        names = [where for where in found if where]
        at = f" at {', '.join(names[:4])}{', ...' * (len(names) > 4)}" if names else ""
        lines.append(f"region {region}{at}: {reason}")
    return lines
