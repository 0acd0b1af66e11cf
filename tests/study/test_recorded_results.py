"""The numbers under results/: judged and drawn as they were committed, and found again by their runs."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from study import run_queue
from study.api import redraw
from study.claims import judge_claims
from study.run_queue import Progress, RunQueue
from study.runs import StudyResults
from study.tables import summarize_study

RESULTS = Path(__file__).parents[2] / "results"
STUDIES = {"digits": 38, "paper": 4 * 38 + 38, "outlook": 4 * 24}
"""Final runs, and further seeds."""


@pytest.fixture(params=STUDIES)
def recorded(request, tmp_path):
    """A copy of a study as it is committed, and the number of its runs."""
    shutil.copytree(
        RESULTS / request.param,
        tmp_path / "out",
        ignore=shutil.ignore_patterns(".lock", "figures", "report.html"),
    )
    return tmp_path / "out", STUDIES[request.param]


def snapshot(out):
    return {path.relative_to(out): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("recorded", ["digits"], indirect=True)
@pytest.mark.usefixtures("no_figures")
def test_redrawing_writes_the_same_claims(recorded):
    out, _ = recorded
    before = snapshot(out)
    redraw(out)
    after = snapshot(out)
    assert {path: after[path] for path in before} == before  # claims.json is written again, byte for byte
    assert after.keys() - before.keys() == {Path("report.html")}


def test_the_committed_claims(recorded):
    out, _ = recorded
    results = StudyResults.load(out)
    if results.study.compares_starts:
        judged = [dataclasses.asdict(claim) for claim in judge_claims(results)]
        assert json.loads((out / "claims.json").read_text()) == judged
    text = summarize_study(results)
    for cell, records in results.finals.items():
        errors = [sum(run.errors[-5:]) / 5 for run in records if run.status == "done"]
        assert not errors or f"{sum(errors) / len(errors):.2%}" in text, cell


def test_its_runs_are_found_and_not_trained_again(recorded, monkeypatch):
    out, count = recorded
    before = snapshot(out)

    def train(*_):
        raise AssertionError("a run was not found")

    monkeypatch.setattr(run_queue, "Trainer", train)
    results = StudyResults.load(out)
    runs = []
    for choice in results.choices:
        data = results.data[choice.cell.dataset].checksum
        runs += choice.final_runs(results.study, data)
        runs += choice.more_runs(results.study, data)[
            : len(results.finals[choice.cell]) - results.study.repeats
        ]
    queue = RunQueue(out, {}, torch.device("cpu"), 1, Progress())
    found = queue.train_all("final runs", runs)
    finished = tuple(f"{name}-" for name in results.study.datasets)
    recorded_finals = {p.name for p in (out / "runs").iterdir() if "-test-" in p.name}
    assert len(found) == count
    assert {run.name for run in runs} == {name for name in recorded_finals if name.startswith(finished)}
    assert snapshot(out) == before
