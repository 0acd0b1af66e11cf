"""BalancedMuon against PathMuon, ``balance`` before AdamW and Muon, and recorded ablations, as tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .methods import LABELS, label
from .networks import NETWORKS
from .records import Cell, cells_of
from .table import TITLES, markdown, result, select
from .train import Record
from .verdicts import Rows

MAX_DEVIATIONS = 2
METHOD = "balanced-muon"
VARIANTS = {
    "growth=0.0": "no growth",
    "set=pathsgd.muon.upkeep.MOST=1.0": "no upkeep",
    "set=pathsgd.optim.relative.depth.SHALLOW=1e9": "no depth rule in a region",
    "set=pathsgd.optim.relative.depth.SHALLOW_NETWORK=1e9": "no depth rule across norms",
    "set=pathsgd.optim.relative.sizes.SMALL=1e-9": "no catching up",
    "set=pathsgd.optim.relative.sizes.SHARE=0.01": "SHARE 0.01",
    "set=pathsgd.muon.balanced_muon.NOISE=0.0": "no noise bound",
    "set=pathsgd.optim.relative.blocks.MOST=0": "rows of one matrix together",
}
"""Options of BalancedMuon in recorded ablations, each with one thing changed: its name in the table."""
OURS, RIVAL = LABELS["balanced-muon"], LABELS["path-muon"]
USUAL = (LABELS["adamw"], LABELS["muon"])
HEAD = f"""Validation error in percent (CIFAR-10) or loss in nats (text, digits): mean ± standard deviation
over seeds; in brackets a rate that is not the default. Verdicts: yes if the mean is lower, or higher by at
most {MAX_DEVIATIONS} standard deviations, pooled over both sets of seeds; in brackets the difference."""


def summarize(records: Sequence[Record]) -> str:
    """All in Markdown; variants of BalancedMuon stand among the ablations only."""
    parts = ["# Balanced steps", HEAD, _failures(records)]
    cells = cells_of(records)
    starts = [*TITLES, *sorted({key[2] for key in cells} - set(TITLES))]
    for epochs in sorted({key[3] for key in cells}):
        rows = {start: select(cells, (RIVAL, OURS, *USUAL), start, epochs) for start in starts}
        parts += [
            f"## {epochs} epochs: results\n\n{_results(rows)}" if any(rows.values()) else "",
            f"## {epochs} epochs: verdicts\n\n{verdicts}" if (verdicts := _verdicts(rows)) else "",
            f"## {epochs} epochs: ablations\n\n{changes}" if (changes := _ablations(records, epochs)) else "",
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _failures(records: Sequence[Record]) -> str:
    failed = [r for r in records if "failure" in r]
    kinds = {(r["method"], r["failure"]): r["network"] for r in failed}
    lines = [f"- {method} on {network}: {why}" for (method, why), network in kinds.items()]
    return "\n".join([f"{len(failed)} of {len(records)} runs failed:\n", *lines]) if failed else ""


def _results(rows: dict[str, Rows]) -> str:
    columns = [
        (method, start)
        for method in (RIVAL, OURS, *USUAL)
        for start, by_network in rows.items()
        if any(method in row for row in by_network.values())
    ]
    lines = []
    for network in _networks(rows):
        cells = [rows[start].get(network, {}).get(method) for method, start in columns]
        lines.append([NETWORKS[network].label, *(result(cell, math.nan) for cell in cells)])
    return markdown(["network", *(f"{method}, {start}" for method, start in columns)], lines)


def _networks(rows: dict[str, Rows]) -> list[str]:
    return [network for network in NETWORKS if any(network in by_network for by_network in rows.values())]


def _verdicts(rows: dict[str, Rows]) -> str:
    """A line for each network, and on how many the claim holds."""
    starts = ("balanced", "unbalanced")
    claims = {f"{OURS} as good as {RIVAL}, {' and '.join(starts)}": [((OURS, s), (RIVAL, s)) for s in starts]}
    for method in USUAL:
        for start in (s for s, row in rows.items() if row and s.startswith("unbalanced+balance")):
            claims[f"{method} from {start} as good as from balanced"] = [
                ((method, start), (method, "balanced"))
            ]
    lines = [["network", *claims]]
    for network in _networks(rows):
        line = [NETWORKS[network].label]
        for pairs in claims.values():
            cells = [[rows[start].get(network, {}).get(m) for m, start in pair] for pair in pairs]
            apart = [deviations(a, b) for a, b in cells if a is not None and b is not None]
            line.append(_state(apart) if len(apart) == len(pairs) else "")
        if any(line[1:]):
            lines.append(line)
    if len(lines) == 1:
        return ""
    columns = list(zip(*lines[1:], strict=True))[1:]
    counts = [f"{sum(c.startswith('yes') for c in column)} of {sum(map(bool, column))}" for column in columns]
    return markdown(lines[0], [*lines[1:], ["yes", *counts]])


def _state(apart: Sequence[float]) -> str:
    word = "yes" if all(a <= MAX_DEVIATIONS for a in apart) else "no"
    return f"{word} ({'; '.join(f'{a:+.1f}' for a in apart)})"


def deviations(ours: Cell, theirs: Cell) -> float:
    """By how many standard deviations ours is higher; infinite where it diverges."""
    apart = math.inf if math.isinf(ours.mean) else ours.mean - theirs.mean
    if not math.isfinite(apart):
        return apart
    variances = [cell.spread**2 for cell in (ours, theirs) if cell.spread is not None]
    deviation = math.sqrt(statistics.fmean(variances)) if variances else 0.0
    return apart / deviation if deviation else math.copysign(math.inf, apart) if apart else 0.0


Values = dict[tuple[str, str], dict[int, float]]  # by network and method, then by seed; diverged is infinite


def _ablations(records: Sequence[Record], epochs: int) -> str:
    values: Values = {}
    for r in records:
        ours = r["method"].partition(":")[0] == METHOD and r["start"] == "balanced"
        if ours and r["epochs"] == epochs and r["lr"] is None and "failure" not in r:
            value = math.inf if r["diverged"] else r["value"]
            values.setdefault((r["network"], r["method"]), {})[r["seed"]] = value
    methods = list(dict.fromkeys(method for _, method in values if method != METHOD))
    networks = [n for n in NETWORKS if (n, METHOD) in values]
    if not methods or not networks:
        return ""
    lines = []
    for method in methods:
        changes = [relative_change(values, network, method) for network in networks]
        known = [change for change in changes if change is not None]
        mean = statistics.fmean(known) if known else None
        name = VARIANTS.get(method.partition(":")[2], label(method))
        lines.append([name, *map(_percent, [*changes, mean])])
    noise = [_noise([*values[network, METHOD].values()]) for network in networks]
    lines.append(["one standard deviation of the default", *noise, ""])
    head = "Change against the default in percent, over the same seeds; positive is worse."
    return head + "\n\n" + markdown(["variant", *(NETWORKS[n].label for n in networks), "mean"], lines)


def relative_change(values: Values, network: str, method: str) -> float | None:
    """In percent, over the seeds that both were run with."""
    ours, theirs = values.get((network, method), {}), values[network, METHOD]
    seeds = ours.keys() & theirs.keys()
    if not seeds:
        return None
    before = statistics.fmean(theirs[seed] for seed in seeds)
    return 100 * (statistics.fmean(ours[seed] for seed in seeds) / before - 1)


def _percent(change: float | None) -> str:
    if change is None:
        return ""
    return f"{change:+.1f}" if math.isfinite(change) else "diverges"


def _noise(values: Sequence[float]) -> str:
    if len(values) < 2 or math.inf in values:
        return ""
    return f"{100 * statistics.stdev(values) / statistics.fmean(values):.1f}"
