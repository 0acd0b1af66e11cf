"""Records of jobs: JSON lines, one folder or file of them or several."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .methods import label
from .train import Job, Record

FILE = "records.jsonl"


def read_records(places: Iterable[Path]) -> list[Record]:
    """All records of files and folders; of those of the same job the last that did not fail."""
    by_job: dict[Job, Record] = {}
    for place in places:
        for path in sorted(place.glob("*.jsonl")) if place.is_dir() else [place]:
            for line in path.read_text().splitlines() if path.exists() else []:
                record = json.loads(line)
                job = job_of(record)
                if "failure" not in record or job not in by_job:
                    by_job[job] = record
    return list(by_job.values())


def job_of(record: Record) -> Job:
    """The job that a record is of."""
    return Job(**{field.name: record[field.name] for field in fields(Job) if field.name in record})


def without_recorded(jobs: Iterable[Job], records: Iterable[Record]) -> list[Job]:
    """The jobs still to run, each once. Those that failed are run again."""
    seen = {job_of(record) for record in records if "failure" not in record}
    left = []
    for job in jobs:
        if job not in seen:
            seen.add(job)
            left.append(job)
    return left


def write_jobs(path: Path, jobs: Iterable[Job]) -> None:
    """Jobs as JSON, one to a line."""
    lines = ",\n".join(json.dumps(asdict(job)) for job in jobs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[\n{lines}\n]\n")


def read_jobs(path: Path) -> list[Job]:
    return [Job(**item) for item in json.loads(path.read_text())]


@dataclass(frozen=True)
class Cell:
    """The runs of one network, method, start and rate over seeds.

    Attributes:
        values: of each seed; None where it diverged.
        lr: the rate of the jobs, None for the default.
        rate: the rate that was used.
        method: of the jobs.
    """

    values: tuple[float | None, ...]
    lr: float | None
    rate: float
    method: str

    @property
    def mean(self) -> float:
        """Over seeds; infinite where one diverged."""
        if not self.values or None in self.values:
            return float("inf")
        return statistics.fmean(v for v in self.values if v is not None)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, of two or more that did not diverge."""
        kept = [v for v in self.values if v is not None]
        return statistics.stdev(kept) if len(kept) > 1 and len(kept) == len(self.values) else None


Cells = dict[tuple[str, str, str, int], list[Cell]]


def cells_of(records: Iterable[Record]) -> Cells:
    """By (network, label of the method, start, epochs): a cell for each rate, ascending."""
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if "failure" not in record:
            key = (record["network"], label(record["method"]), record["start"], record["epochs"])
            # Muon's second rate makes another cell under the same label.
            grouped.setdefault((*key, record["method"], record["lr"]), []).append(record)
    cells: Cells = {}
    for (network, name, start, epochs, method, lr), group in grouped.items():
        group.sort(key=lambda r: r["seed"])
        values = tuple(None if r["diverged"] else r["value"] for r in group)
        cell = Cell(values, lr, group[0]["rate"], method)
        cells.setdefault((network, name, start, epochs), []).append(cell)
    return {key: sorted(by_rate, key=lambda cell: cell.rate) for key, by_rate in cells.items()}


def best_rate(cells: Cells, network: str, method_label: str, start: str, epochs: int) -> Cell | None:
    """The cell of the best first seed, as rates are chosen with one seed; None if no rate worked."""
    tried = [c for c in cells.get((network, method_label, start, epochs), []) if c.values[0] is not None]
    return min(tried, key=lambda c: c.values[0] or 0.0, default=None)


def default_cell(cells: Cells, network: str, method_label: str, start: str, epochs: int) -> Cell | None:
    """The cell at the default rate."""
    return next((c for c in cells.get((network, method_label, start, epochs), []) if c.lr is None), None)
