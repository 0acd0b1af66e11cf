"""Verdicts on studies whose outcome is known by construction."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from pathsgd.paper.analysis.claims import judge_claims
from pathsgd.paper.analysis.statistics import race_to_loss, summarize
from pathsgd.paper.analysis.study_tables import describe_claims, tabulate_choices, tabulate_results
from pathsgd.paper.config import Cell
from pathsgd.paper.records.run_folder import RunRecord
from pathsgd.paper.records.study_results import Choice, StepCost, Trial
from support.fake_study import fake_study


def verdicts(results, cost=None):
    return [claim.verdict for claim in judge_claims(dataclasses.replace(results, cost=cost))]


def with_runs(results, cell, **curves):
    """The same study with other numbers in one cell: curves by name, or factors on what is there."""

    def changed(run: RunRecord) -> RunRecord:
        lines = [{n: f * v if (f := curves.get(n)) else v for n, v in line.items()} for line in run.lines]
        return dataclasses.replace(run, lines=lines)

    finals = {**results.finals, cell: [changed(run) for run in results.finals[cell]]}
    return dataclasses.replace(results, finals=finals)


@pytest.fixture
def study(tmp_path):
    return fake_study(tmp_path, datasets=("mnist", "cifar100"), dropouts=(0.0, 0.5), repeats=2)


def test_what_the_fake_study_was_made_to_show(study):
    """Path-SGD the fastest everywhere and the best at the end; on CIFAR-100 claim 4 asks for the contrary."""
    found = judge_claims(dataclasses.replace(study, cost=StepCost("784-8-8-10", "a machine", 100.0, 101.0)))
    assert [claim.verdict for claim in found] == [
        "held", "held", "held", "not held", "held", "held", "held",
    ]  # fmt: skip
    assert "mnist: epochs to the lowest training loss both reach: SGD: to " in found[2].evidence[0]
    assert "1.010 times as long" in found[6].evidence[0]
    for factor, verdict in ((0.97, "held"), (0.5, "not held")):  # slightly lower
        better = with_runs(study, Cell("cifar100", 0.0, "balanced", "sgd"), test_error=factor)
        assert verdicts(better)[3] == verdict


def test_each_claim_can_fail(study):
    mnist = ("mnist", 0.0)
    apart = dataclasses.replace(study.exact[Cell(*mnist, "balanced", "path-sgd")])
    apart.lines[3]["train_loss"] += 1e-12
    assert verdicts(study)[0] == "not held"
    assert "NOT equal" in judge_claims(study)[0].evidence[0]
    unhurt = with_runs(study, Cell(*mnist, "unbalanced", "sgd"), test_error=1e-3, train_loss=1e-3)
    assert verdicts(unhurt)[1] == "not held"
    assert [e.split(":")[:2] for e in judge_claims(unhurt)[1].evidence if e.startswith("AGAINST")] == [
        ["AGAINST", " mnist, SGD"]
    ]
    fast = with_runs(study, Cell(*mnist, "balanced", "adagrad"), train_loss=1e-2)
    assert verdicts(fast)[2] == "not held"
    worse = with_runs(study, Cell("cifar100", 0.5, "balanced", "path-sgd"), test_error=9)
    assert verdicts(worse)[4] == "not held"
    assert verdicts(study, StepCost("n", "d", 100.0, 151.0))[6] == "not held"
    spared = with_runs(study, Cell("mnist", 0.5, "balanced", "path-sgd"), test_error=9)
    assert verdicts(spared)[4] == "held"  # the paper excepts MNIST


def changed_by(results, cell, name, *by):
    """The same with so much added to a curve of each repeat, after every epoch."""
    for run, more in zip(results.finals[cell], by, strict=True):
        for line in run.lines:
            line[name] += more
    return results


PATH_UNBALANCED = Cell("mnist", 0.0, "unbalanced", "path-sgd")


def test_one_epoch_says_little_of_curves(study):
    """With large steps one run wobbles as much as rounding moves it."""
    for run in study.finals[PATH_UNBALANCED]:
        run.lines[-1]["test_error"] += 0.009
    assert verdicts(study)[0] == "held"


@pytest.mark.parametrize(
    ("name", "by"),
    [("test_error", (0.006, 0.006)), ("test_error", (0.02, -0.02)), ("train_loss", (0.4, 0.4))],
)
def test_curves_that_are_not_the_same(study, name, by):
    """Seed by seed: what one has more and another less does not make up for each other."""
    (found, *_) = judge_claims(changed_by(study, PATH_UNBALANCED, name, *by))
    assert found.verdict == "not held"
    assert found.evidence[0].startswith("AGAINST: mnist, Path-SGD")


@pytest.mark.parametrize("init", ["balanced", "unbalanced"])
def test_path_sgd_without_a_step_size_that_ended_well_is_held_against_it(tmp_path, init):
    results = fake_study(tmp_path, datasets=("mnist",), unchosen=[("path-sgd", init)])
    found = judge_claims(results)
    assert found[0].verdict == "not held"
    assert "no step size ended well" in found[0].evidence[0]
    lost = "not held" if init == "balanced" else "held"
    assert found[2].verdict == found[3].verdict == lost


def test_a_loss_that_rose_is_no_harm_where_the_error_fell(study):
    cell = Cell("mnist", 0.0, "unbalanced", "sgd")
    assert verdicts(with_runs(study, cell, test_error=1e-3, train_loss=100.0))[1] == "not held"


def test_what_was_not_run_is_not_tested(tmp_path):
    alone = fake_study(tmp_path, methods=("path-sgd",), inits=("balanced",), epochs=3)
    assert verdicts(alone) == ["not tested"] * 7
    said = [claim.evidence[-1] for claim in judge_claims(alone)[:6]]
    assert said[0] == said[5].replace("SGD, ", "") == "not run: the unbalanced start"
    assert said[1] == "not run: SGD, AdaGrad, the unbalanced start"
    assert said[4] == "not run: SGD, AdaGrad, with dropout"


def test_a_run_that_diverged_is_harm_and_never_wins(tmp_path):
    ends = {("sgd", "unbalanced", 0): 2, ("path-sgd", "balanced", 0): 3}
    results = fake_study(tmp_path, datasets=("mnist",), diverged=ends, unchosen=[("adagrad", "unbalanced")])
    found = judge_claims(results)
    assert found[1].verdict == "held"
    assert found[2].verdict == found[3].verdict == "not held"
    assert "Path-SGD diverged" in found[2].evidence[0]
    text = str(tabulate_results(results))
    assert "none" in text
    assert "diverged" in text
    assert "[2.13%]" in str(tabulate_choices(results.choices))
    assert describe_claims(found).splitlines()[2].startswith("1. ")


def test_where_nothing_ended_well_nothing_is_held_against_the_unbalanced_start(tmp_path):
    both = [(name, init) for name in ("sgd", "adagrad") for init in ("balanced", "unbalanced")]
    results = fake_study(tmp_path, datasets=("mnist",), unchosen=both)
    assert verdicts(results)[1] == "not tested"
    assert verdicts(results)[5] == "not tested"  # (b) and (c) hold
    equal = fake_study(tmp_path / "equal", datasets=("mnist",), methods=("sgd", "adagrad", "path-sgd"))
    for name in ("sgd", "adagrad"):
        for init in ("balanced", "unbalanced"):
            equal = with_runs(equal, Cell("mnist", 0.0, init, name), test_error=1e-300, train_loss=1e-300)
            for own in equal.finals[Cell("mnist", 0.0, init, name)]:
                own.lines[-1].update(test_error=0.0, train_loss=0.0)
    assert verdicts(equal)[1] == "not held"
    assert verdicts(equal)[3] == "not held"


def test_rivals_that_diverged_lose(tmp_path):
    ends = {("sgd", "balanced", 0): 2, ("adagrad", "balanced", 0): 3}
    assert verdicts(fake_study(tmp_path, datasets=("mnist",), diverged=ends))[3] == "held"


def test_the_edge_of_what_was_tried_is_said():
    cell = Cell("mnist", 0.0, "balanced", "sgd")
    tried = [Trial(10.0**-a, "done", 0.02, 3, "", "x") for a in range(3)]
    said = [str(Choice(cell, one.step_size, tried)) for one in tried]
    assert ["largest tried" in text for text in said] == [True, False, False]
    assert ["smallest tried" in text for text in said] == [False, False, True]
    assert "largest" not in str(Choice(cell, 1.0, tried[:2])), "of two each is an edge"


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """As in `pathsgd figures DIR | head`."""
    fake_study(tmp_path, datasets=("mnist",), epochs=2)
    command = [sys.executable, "-m", "pathsgd.cli", "figures", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=120) == 141


def test_evidence(study):
    runs = {name: study.finals[Cell("mnist", 0.0, "balanced", name)] for name in ("sgd", "path-sgd")}
    found = race_to_loss(runs["path-sgd"], runs["sgd"])
    assert found is not None
    assert found.own < found.other == found.of == found.ahead == 12
    assert str(found) == f"to {found.target:.3g} in {found.own} against 12, lower after 12 of 12"
    assert summarize([0.01, 0.03]).percent() == "2.00% (1.00 to 3.00)"
    assert summarize([0.01, float("nan")]).percent() == "1 of 2 diverged"
    assert summarize([float("nan")]).plain() == "diverged"
    assert summarize([]).plain() == "none (no step size ended well)"
