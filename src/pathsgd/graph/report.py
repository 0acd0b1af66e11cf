"""Reports on a graph for a person to read: what is path-normalised, what is not, and why."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

from pathsgd.graph import nodes
from pathsgd.graph.rules.activations import REPLACEABLE
from pathsgd.graph.structure import ParameterInfo, ParameterStatus, Structure

LEAST_SHARE = 0.25
"""Below it a network is trained for the most part as without paths. Transformers with ReLU MLPs are far above
(five sixths of the weights of a block), the same with GELU below (a sixth: values and output projections)."""

NOT_HOMOGENEOUS = " is not positively homogeneous"
"""The words of a reason after the name of an operator."""

NAMED = 3
"""Causes that are named, the most frequent first."""


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
    lines = [summarize(graph), protection, *lines]
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
    """The share of a parameter that ``entries`` are, in rows where it has some; empty if they are all."""
    share = Fraction(entries, math.prod(info.shape))
    return "" if share == 1 else f"{share} of its {'rows' if len(info.shape) > 1 else 'entries'} "


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


# Networks with few weights on common paths


def explain_small_share(graph: Structure) -> str | None:
    """Says what is wrong and what to do, if fewer than LEAST_SHARE of the trainable weights share a path with
    the matrix of another layer.

    Where a norm's weight is all that shares a path with a matrix, gamma hardly differs from a constant: that
    does not count. Embeddings and the last layer are left out: they may hold most of the weights, and a norm
    before or after them is the rule.
    """
    uses: dict[str, list[int]] = {name: [] for name in graph.parameters}
    for k, weight in graph.weights():
        if weight.parameter is not None:
            uses[weight.parameter.name].append(k)
    readers = graph.readers()
    entries = {name: math.prod(info.shape) for name, info in graph.parameters.items() if info.trainable}
    inner = {
        name: n
        for name, n in entries.items()
        if "embedding" not in graph.parameters[name].roles
        and not any(_is_last_layer(graph, readers, k) for k in uses[name])
    }
    counted = inner or entries
    total, shared = sum(counted.values()), sum(graph.parameters[name].with_matrices for name in counted)
    if shared >= LEAST_SHARE * total:
        return None
    sources = [list(node.inputs) for node in graph.nodes]
    causes: Counter[str] = Counter()
    for name, n in counted.items():
        for cause in _find_causes(graph, readers, sources, name, uses[name]):
            causes[cause] += n - graph.parameters[name].with_matrices
    return _write_message(graph.model, total, shared, +causes, left_out=counted != entries)


def _write_message(model: str, total: int, shared: int, causes: Counter[str], left_out: bool) -> str:
    share = f"only {shared / total:.0%}" if shared else "none"
    aside = ", embedding and last layer left out," if left_out else ""
    sentences = [
        f"{share} of the {total:,} trainable weights of {model}{aside} share a path with the matrix of "
        f"another layer: {'the others' if shared else 'they'} are trained as without paths."
    ]
    if causes:
        named = ", ".join(f"{cause} ({n:,} weights)" for cause, n in causes.most_common(NAMED))
        sentences.append(f"What cuts them off: {named}.")
    activations = ", ".join(cause for cause, _ in causes.most_common() if cause in REPLACEABLE)
    replace = (
        f"Replace {activations} by relu, leaky_relu or a squared relu, or take" if activations else "Take"
    )
    sentences.append(f"{replace} BalancedMuon, which trains these weights as well.")
    sentences.append("print(optimizer.graph) has the reason for each parameter.")
    return " ".join(sentences)


def _is_last_layer(graph: Structure, readers: list[list[int]], k: int) -> bool:
    """Whether a node is returned by the model, with nothing but its bias added."""
    while k not in graph.outputs:
        if len(readers[k]) != 1:
            return False
        k = readers[k][0]
        match graph.nodes[k].operation:
            case nodes.Add():
                added = [graph.nodes[source].operation for source in graph.nodes[k].inputs]
                if sum(not isinstance(operation, nodes.Source) for operation in added) > 1:
                    return False
            case nodes.Reshape() | nodes.Permute() | nodes.Expand() | nodes.Slice():
                pass
            case _:
                return False
    return True


def _find_causes(
    graph: Structure, readers: list[list[int]], sources: list[list[int]], name: str, uses: list[int]
) -> set[str]:
    """Returns what the paths of a parameter begin and end at, up to the next matrix."""
    info = graph.parameters[name]
    if info.status in (ParameterStatus.OUTSIDE, ParameterStatus.UNUSED):
        return {info.reason.removeprefix("outside: ").removesuffix(NOT_HOMOGENEOUS)}
    found = {graph.ends[k] for k in _reach(graph, uses, readers) if k in graph.ends}
    for k in _reach(graph, uses, sources):
        operation = graph.nodes[k].operation
        if isinstance(operation, nodes.Begin):
            found.add(operation.reason)
    return {reason.removesuffix(NOT_HOMOGENEOUS) for reason in found - {"input", "output"}}


def _reach(graph: Structure, start: list[int], following: list[list[int]]) -> set[int]:
    """The nodes that paths from these lead to before they meet a matrix."""
    reached, waiting = set(start), list(start)
    while waiting:
        for k in following[waiting.pop()]:
            operation = graph.nodes[k].operation
            matrix = (
                isinstance(operation, (nodes.Linear, nodes.Conv)) and operation.weight.parameter is not None
            )
            if k not in reached and not matrix:
                reached.add(k)
                waiting.append(k)
    return reached
