"""Which jobs a stage consists of, given what was recorded: searches go on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .methods import METHODS, write
from .records import value_of, values_of_search
from .search import TRIALS, best_after, order_trials, propose
from .train import Job, Record

Records = dict[Job, Record]
SEEDS, MORE_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)
CLOSE = 0.05


@dataclass(frozen=True)
class Setting:
    """The runs that a stage is planned for."""

    networks: Sequence[str]
    methods: Sequence[str]
    seeds: Sequence[int] = (0,)
    lengths: Sequence[float] = (1.0,)
    batches: Sequence[float] = (1.0,)
    starts: Sequence[str] = ("usual",)


def plan_runs(setting: Setting, records: Records) -> list[Job]:
    """All of everything, with options as the methods have them."""
    return [
        Job(network, method, seed, length, batch, start)
        for network in setting.networks for method in setting.methods for seed in setting.seeds
        for length in setting.lengths for batch in setting.batches for start in setting.starts
    ]  # fmt: skip


def plan_search(setting: Setting, records: Records) -> list[Job]:
    """What comes next in the search of each method on each network, with the first seed."""
    jobs = []
    for network in setting.networks:
        for name in setting.methods:
            coordinates = METHODS[name].coordinates
            values = values_of_search(records, network, name, "valid")
            jobs += [
                Job(network, write(name, dict(zip((c.name for c in coordinates), point, strict=True))))
                for point in propose(coordinates, values)
            ]
    return jobs


def chosen(records: Records, network: str, name: str, trials: int = TRIALS) -> str | None:
    """The method with the options that so many trials chose, by the part that is there for choosing."""
    coordinates = METHODS[name].coordinates
    if not coordinates:
        return name
    values = values_of_search(records, network, name, "valid")
    order = order_trials(coordinates, values)
    best = best_after(len(order) if trials >= TRIALS else trials, order, values)
    if best is None:
        return None
    return write(name, dict(zip((c.name for c in coordinates), best, strict=True)))


def plan_seeds(setting: Setting, records: Records) -> list[Job]:
    """What was chosen, three times; five times all methods of a network where the best two are close."""
    jobs = []
    for network in setting.networks:
        methods = [m for name in setting.methods if (m := chosen(records, network, name)) is not None]
        runs = [[Job(network, method, seed) for seed in SEEDS] for method in methods]
        jobs += [job for own in runs for job in own]
        if all(job in records for own in runs for job in own):
            means = sorted(sum(value_of(records[job], "test") for job in own) / len(own) for own in runs)
            if len(means) > 1 and means[1] - means[0] < CLOSE * abs(means[0]):
                jobs += [Job(network, method, seed) for method in methods for seed in MORE_SEEDS]
    return jobs


STAGES: dict[str, Callable[[Setting, Records], list[Job]]] = {
    "runs": plan_runs, "search": plan_search, "seeds": plan_seeds,
}  # fmt: skip
