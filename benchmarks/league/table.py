"""The tables: what searches found in 1, 3 and 8 trials, and ours against the best of them over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .methods import METHODS, label
from .networks import NETWORKS, SETS
from .plan import MORE_SEEDS, Records, chosen
from .records import value_of
from .search import TRIALS
from .train import Job

OURS, TARGET = "balanced-muon", "adamw"
AFTER = (1, 3, TRIALS)
T_QUANTILE = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
"""97.5% of the t distribution, by degrees of freedom."""
VERDICTS = (("ahead", 1.0), ("within 2%", 1.02), ("behind", 1.10), ("far behind", math.inf))


def render(records: Records) -> str:
    """All sets that something was recorded of, in Markdown."""
    parts = []
    for name, networks in SETS.items():
        known = [n for n in networks if any(job.network == n for job in records)]
        if known:
            parts += [
                f"## {name}", render_trials(records, known), render_seeds(records, known),
                render_targets(records, known),
            ]  # fmt: skip
    return "\n\n".join(["# The league", *(part for part in parts if part)]) + "\n"


def render_trials(records: Records, networks: Sequence[str]) -> str:
    """One seed, the part that chose nothing, after 1, 3 and 8 trials."""
    names = [n for n, m in METHODS.items() if m.coordinates]
    lines = []
    for network in networks:
        line = [NETWORKS[network].label]
        for name in names:
            methods = [chosen(records, network, name, trials) for trials in AFTER]
            values = [
                math.inf if method is None else value_of(records.get(Job(network, method), {}), "test")
                for method in methods
            ]
            line.append(" / ".join(map(number, values)) if methods[-1] else "")
        ours = records.get(Job(network, OURS))
        lines.append([*line, "" if ours is None else number(value_of(ours, "test"))])
    heads = [f"{METHODS[n].label}, {' / '.join(map(str, AFTER))} trials" for n in names]
    return markdown(["one seed", *heads, f"{METHODS[OURS].label}, no trial"], lines)


def render_seeds(records: Records, networks: Sequence[str]) -> str:
    """Ours and the best baseline over the seeds that both have, and how often which verdict is reached."""
    lines, counts = [], dict.fromkeys((word for word, _ in VERDICTS), 0)
    for network in networks:
        ours = seeds_of(records, network, OURS)
        rivals = {
            method: values for name, m in METHODS.items()
            if m.coordinates and (method := chosen(records, network, name)) is not None
            and len(values := seeds_of(records, network, method)) > 1
        }  # fmt: skip
        if len(ours) < 2 or not rivals:
            continue
        best = min(rivals, key=lambda method: statistics.fmean(rivals[method].values()))
        ours = {seed: ours[seed] for seed in ours.keys() & rivals[best].keys()}
        ratio, interval = compare(ours, rivals[best])
        verdict = next(word for word, most in VERDICTS if ratio <= most)
        counts[verdict] += 1
        lines.append([
            NETWORKS[network].label, label(best), number(statistics.fmean(rivals[best].values())),
            number(statistics.fmean(ours.values())), f"{ratio:.3f} ± {interval:.3f}", str(len(ours)), verdict,
        ])  # fmt: skip
    if not lines:
        return ""
    heads = ["over seeds", "best baseline", "its mean", "ours", "ours / its", "seeds", ""]
    summary = ", ".join(f"{word} on {count}" for word, count in counts.items())
    return f"{markdown(heads, lines)}\n\nOf {len(lines)}: {summary}."


def render_targets(records: Records, networks: Sequence[str]) -> str:
    """The part of the steps after which a method has the training loss that AdamW's best ends with."""
    names, lines = [n for n in METHODS if n != TARGET], []
    for network in networks:
        best = chosen(records, network, TARGET)
        target = records.get(Job(network, best), {}).get("losses") if best else None
        if not target:
            continue
        line = [NETWORKS[network].label]
        for name in names:
            method = chosen(records, network, name)
            losses = records.get(Job(network, method), {}).get("losses", []) if method else []
            reached = next((k + 1 for k, loss in enumerate(losses) if loss <= target[-1]), None)
            line.append(f"{100 * reached / len(losses):.0f}%" if reached else "not" if losses else "")
        lines.append(line)
    if not lines:
        return ""
    return markdown(
        [f"steps to the loss of {METHODS[TARGET].label}", *(METHODS[n].label for n in names)], lines
    )


def seeds_of(records: Records, network: str, method: str) -> dict[int, float]:
    """What a method came to on a network, by seed."""
    jobs = [Job(network, method, seed) for seed in MORE_SEEDS]
    return {job.seed: value_of(records[job], "test") for job in jobs if job in records}


def compare(ours: dict[int, float], theirs: dict[int, float]) -> tuple[float, float]:
    """The ratio of the means, and half of its 95% interval, from paired differences."""
    seeds = sorted(ours.keys() & theirs.keys())
    mean = statistics.fmean(theirs[seed] for seed in seeds)
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    if not all(map(math.isfinite, differences)):
        return math.inf, math.nan
    error = statistics.stdev(differences) / len(seeds) ** 0.5
    return 1 + statistics.fmean(differences) / mean, T_QUANTILE[len(seeds) - 1] * error / abs(mean)


def number(value: float) -> str:
    if math.isinf(value):
        return "fails"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}" if abs(value) < 1 else f"{value:.3f}"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
