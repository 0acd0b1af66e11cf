"""Reports on a graph for a person to read: what is path-normalised, what is not, and why."""

from __future__ import annotations

import math
from fractions import Fraction

from pathsgd.graph.structure import ParameterInfo, Structure


def summarize(graph: Structure) -> str:
    """One line: how many parameters lie on paths with others."""
    counted, regions = list(graph.parameters.values()), len(graph.parameter_regions())
    normalised = sum(info.normalised for info in counted)
    return (
        f"PathGraph of {graph.model}: {normalised} of {len(counted)} parameters path-normalised, "
        f"{regions} region{'s' * (regions != 1)}"
    )


def report(graph: Structure, protection: str) -> str:
    """What can be rescaled, one line per parameter, then the places where a region ends."""
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
    head, _, on_paths = summarize(graph).partition(": ")
    lines = [f"{head}: {protection}", f"On paths, for PathSGD: {on_paths}", *lines]
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
    if not info.alone:
        return f"yes{frozen}"
    share = Fraction(info.alone, math.prod(info.shape))
    return f"yes{frozen}, {share} of its {'rows' if len(info.shape) > 1 else 'entries'} alone"


def _inner_ends(graph: Structure, shown: dict[int, int]) -> list[str]:
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
