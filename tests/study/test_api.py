"""Runs, sweeps and studies from Python."""

import dataclasses

from study.api import redraw, reproduce, sweep, train
from study.config import Run, Study, StudySetup
from study.run_queue import Progress
from support.data_files import clouds

TINY = Study(
    datasets=("clouds",), methods=("sgd", "path-sgd"), dropouts=(0.0,), hidden=(8,), step_sizes=(0.1, 0.01),
    search_epochs=2, epochs=2, validation=50, batch=20,
)  # fmt: skip


class Recording(Progress):
    def __init__(self):
        super().__init__()
        self.calls = []

    def start_phase(self, title, epochs):
        self.calls.append(("start_phase", title, epochs))

    def epoch(self, run, metrics):
        self.calls.append(("epoch", metrics["epoch"]))

    def run_ended(self, record):
        self.calls.append(("run_ended", record.status))


def test_a_run_tells_its_progress_and_is_trained_once(tmp_path):
    run = Run(dataset="clouds", hidden=(8,), epochs=2, batch=20, step_size=0.1)
    progress = Recording()
    record = train(run, tmp_path, data=clouds(), progress=progress)
    assert progress.calls == [
        ("start_phase", "Path-SGD", 2), ("epoch", 0), ("epoch", 1), ("epoch", 2), ("run_ended", "done"),
    ]  # fmt: skip
    assert record.run.data != ""
    again = Recording()
    assert train(run, tmp_path, data=clouds(), progress=again) == record
    assert ("epoch", 1) not in again.calls


def test_a_run_whose_files_were_changed_is_trained_again_and_says_so(tmp_path, capsys):
    run = Run(dataset="clouds", hidden=(8,), epochs=1, batch=20, step_size=1)
    record = train(run, tmp_path, data=clouds())
    result = next(tmp_path.rglob("result.json"))
    result.write_text(result.read_text().replace("done", "diverged"))
    assert train(run, tmp_path, data=clouds(), progress=Progress(quiet=False)) == record
    assert "trained again, since its files are not as it left them: clouds" in capsys.readouterr().out


def test_a_study_keeps_the_choices_of_its_sweep(tmp_path, monkeypatch):
    data = {"clouds": clouds()}
    choices = sweep(TINY, tmp_path, data=data)
    assert [choice.cell for choice in choices] == TINY.cells()
    results = reproduce(TINY, tmp_path, StudySetup(lanes=1), data=data, figures=False)
    assert results.choices == choices
    assert results.cost is not None
    assert not (tmp_path / "figures").exists()
    monkeypatch.setattr("study.api.draw_all", lambda results, folder: [])  # recorded ones are drawn
    assert redraw(tmp_path).finals == results.finals
    assert (tmp_path / "report.html").exists()


def test_further_seeds_are_run_where_a_verdict_hangs_on_them(tmp_path, monkeypatch):
    """Of one cell, as if it were the one."""
    cell = TINY.cells()[0]
    monkeypatch.setattr("study.api.find_undecided", lambda results: {cell})
    study = dataclasses.replace(TINY, repeats=2, more_repeats=1, step_sizes=(0.1,))
    for phases in (["search for step sizes", "final runs", "further seeds"], []):
        progress = Recording()
        results = reproduce(study, tmp_path, data={"clouds": clouds()}, progress=progress, figures=False)
        assert [call[1] for call in progress.calls if call[0] == "start_phase"] == phases
        assert {c: [run.run.seed.init for run in runs] for c, runs in results.finals.items()} == {
            c: [0, 1, 2] if c == cell else [0, 1] for c in study.cells()
        }


def test_methods_from_one_start_are_ranked_and_no_claim_is_judged(tmp_path):
    methods = ("momentum", "path-momentum", "path-adagrad")
    study = dataclasses.replace(TINY, methods=methods, inits=("balanced",), step_sizes=(0.1,), repeats=2)
    reproduce(study, tmp_path, StudySetup(lanes=1), data={"clouds": clouds()})
    assert len([path for path in (tmp_path / "runs").iterdir() if "-test-" in path.name]) == 6
    assert "Which method is first" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "claims.json").exists()
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"figure2", "figure4"}
