"""Records of jobs: JSON lines in folders and files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from .methods import METHODS, parse
from .search import Point
from .train import Job, Record

FILE = "records.jsonl"


def read_records(places: Iterable[Path]) -> dict[Job, Record]:
    """All records of files and folders; of those of the same job the last."""
    records = {}
    for place in places:
        for path in sorted(place.glob("*.jsonl")) if place.is_dir() else [place]:
            for line in path.read_text().splitlines() if path.exists() else []:
                record = json.loads(line)
                records[job_of(record)] = record
    return records


def job_of(record: Record) -> Job:
    """The job that a record is of."""
    return Job(**{field.name: record[field.name] for field in fields(Job)})


def value_of(record: Record, part: str) -> float:
    """What a run came to; infinite if it failed."""
    value = record.get(part)
    return math.inf if value is None else float(value)


def values_of_search(records: dict[Job, Record], network: str, name: str, part: str) -> dict[Point, float]:
    """What the trials of a method on a network came to, by the values of its coordinates."""
    names = [c.name for c in METHODS[name].coordinates]
    values = {}
    for job, record in records.items():
        if job.network != network or job.method.partition(":")[0] != name or job != searched(job):
            continue
        options = parse(job.method)[1]
        if set(options) == set(names):
            values[tuple(float(options[n]) for n in names)] = value_of(record, part)
    return values


def searched(job: Job) -> Job:
    """A job as a search would run it."""
    return Job(job.network, job.method)
