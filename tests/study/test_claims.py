"""Verdicts on studies whose outcome is known by construction."""

import dataclasses
import subprocess
import sys

import pytest

from study.claims import find_undecided, judge_claims
from study.config import Cell
from study.files import write_json
from study.runs import Choice, RunFolder, RunRecord, StepCost, StudyResults, Trial
from study.tables import (
    describe_claims,
    summarize_study,
    tabulate_choices,
    tabulate_epochs,
    tabulate_results,
)
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
    """Path-SGD the fastest everywhere; its test error the lowest, by less than the seeds differ."""
    return fake_study(tmp_path, datasets=("mnist", "cifar100"), dropouts=(0.0, 0.5), repeats=3)


def find(claims, number, where):
    (found,) = (c for c in claims[number - 1].comparisons if c.where == where)
    return found


def test_what_the_fake_study_was_made_to_show(study):
    found = judge_claims(dataclasses.replace(study, cost=StepCost("784-8-8-10", "a machine", 100.0, 101.0)))
    assert [claim.verdict for claim in found] == [
        "agrees", "agrees", "agrees", "cannot be told", "cannot be told", "agrees", "agrees",
    ]  # fmt: skip
    assert find(found, 3, "mnist, Path-SGD / SGD").measured == "epochs ratio 0.667 (0.667 to 0.667)"
    assert "1.010 times as long" in found[6].comparisons[0].measured
    # 4 data sets x dropouts: 2 comparisons each with a start, 2 with rivals of each of two kinds
    counts = [len(claim.comparisons) for claim in found]
    assert counts == [8, 8, 4, 4, 8, 3, 1]


def test_each_claim_can_fail(study):
    mnist = ("mnist", 0.0)
    apart = dataclasses.replace(study.exact[Cell(*mnist, "balanced", "path-sgd")])
    apart.lines[3]["train_loss"] += 1e-12
    assert verdicts(study)[0] == "disagrees"
    assert judge_claims(study)[0].comparisons[1].measured == "NOT equal"
    unhurt = with_runs(study, Cell(*mnist, "unbalanced", "sgd"), test_error=1e-3, train_loss=1e-3)
    assert verdicts(unhurt)[1] == verdicts(unhurt)[5] == "disagrees"
    assert [c.where for c in judge_claims(unhurt)[1].comparisons if c.verdict == "disagrees"] == [
        "mnist, SGD, unbalanced / balanced"
    ]
    fast = with_runs(study, Cell(*mnist, "balanced", "adagrad"), train_loss=1e-2)
    assert verdicts(fast)[2] == "disagrees"
    worse = with_runs(study, Cell(*mnist, "balanced", "path-sgd"), test_error=9)
    assert verdicts(worse)[3] == "disagrees"
    worse = with_runs(study, Cell("cifar100", 0.5, "balanced", "path-sgd"), test_error=9)
    assert verdicts(worse)[4] == "disagrees"
    assert verdicts(study, StepCost("n", "d", 100.0, 151.0))[6] == "disagrees"
    assert verdicts(study, StepCost("n", "d", 100.0, 104.9))[6] == "agrees"


@pytest.mark.parametrize(
    ("test_error", "train_loss", "verdict"),
    [(1.3, 0.5, "agrees"), (1.2, 2.1, "agrees"), (1.2, 1.9, "disagrees"), (0.5, 2.1, "agrees")],
)
def test_a_considerable_harm_is_in_the_error_or_in_the_loss(study, test_error, train_loss, verdict):
    cells = [Cell("mnist", 0.0, init, "sgd") for init in ("balanced", "unbalanced")]
    same = dataclasses.replace(study, finals={**study.finals, cells[1]: study.finals[cells[0]]})
    hurt = with_runs(same, cells[1], test_error=test_error, train_loss=train_loss)
    assert find(judge_claims(hurt), 2, "mnist, SGD, unbalanced / balanced").verdict == verdict


def test_the_paper_excepts_mnist_with_dropout(study):
    spared = with_runs(study, Cell("mnist", 0.5, "balanced", "path-sgd"), test_error=9)
    found = find(judge_claims(spared), 5, "mnist, dropout 0.5, Path-SGD - SGD")
    assert (found.verdict, found.note) == ("disagrees", "not part of the claim")
    assert verdicts(spared)[4] == "cannot be told"


def test_a_lower_error_in_every_seed(study):
    """Far more than seeds differ: claims 4 and 5 agree, but for CIFAR-100 against SGD in claim 4."""
    for dataset in ("mnist", "cifar100"):
        for dropout in (0.0, 0.5):
            study = with_runs(study, Cell(dataset, dropout, "balanced", "path-sgd"), test_error=0.5)
    found = judge_claims(study)
    assert found[4].verdict == "agrees"
    assert [c.verdict for c in found[3].comparisons] == ["agrees", "agrees", "disagrees", "agrees"]


@pytest.mark.parametrize(("more", "verdict"), [(0.004, "agrees"), (0.02, "disagrees"), (-0.02, "disagrees")])
def test_on_cifar100_sgd_is_slightly_better_in_the_paper(study, more, verdict):
    path = Cell("cifar100", 0.0, "balanced", "path-sgd")
    found = find(judge_claims(changed_by(study, path, "test_error", more)), 4, "cifar100, Path-SGD - SGD")
    assert (found.verdict, found.agrees_if) == (verdict, "from 0.00 to 1.00")


def changed_by(results, cell, name, *by):
    """The same with so much added to a curve of each repeat, after every epoch."""
    for run, more in zip(results.finals[cell], by if len(by) > 1 else 3 * by, strict=True):
        for line in run.lines:
            line[name] += more
    return results


PATH_UNBALANCED = Cell("mnist", 0.0, "unbalanced", "path-sgd")


@pytest.mark.parametrize(
    ("by", "verdict"),
    [
        ((0.004, 0.004, 0.004), "agrees"),
        ((0.006, 0.006, 0.006), "disagrees"),
        ((-0.006, -0.006, -0.006), "disagrees"),
        ((0.004, 0.001, -0.004), "cannot be told"),  # the mean is small, and not known well enough
    ],
)
def test_the_same_curves_within_half_a_point(study, by, verdict):
    (found, *_) = judge_claims(changed_by(study, PATH_UNBALANCED, "test_error", *by))
    assert found.verdict == verdict


def test_curves_are_compared_over_all_epochs(study):
    """With large steps one run wobbles as much as rounding moves it."""
    for run in study.finals[PATH_UNBALANCED]:
        run.lines[-1]["test_error"] += 0.03
    assert verdicts(study)[0] == "agrees"


def test_with_one_seed_nothing_that_needs_an_interval_can_be_told(tmp_path):
    found = judge_claims(fake_study(tmp_path, datasets=("mnist",), dropouts=(0.0, 0.5)))
    assert [claim.verdict for claim in found] == [
        "cannot be told", "cannot be told", "cannot be told", "cannot be told", "not tested",
        "cannot be told", "not tested",
    ]  # fmt: skip
    assert find(found, 3, "mnist, Path-SGD / SGD").measured == "epochs ratio 0.667, one seed: no interval"
    assert [c.verdict for c in found[0].comparisons] == ["cannot be told", "agrees"] * 2  # bit for bit


@pytest.mark.parametrize("init", ["balanced", "unbalanced"])
def test_path_sgd_without_a_step_size_that_ended_well_has_lost(tmp_path, init):
    results = fake_study(tmp_path, datasets=("mnist",), unchosen=[("path-sgd", init)], repeats=2)
    found = judge_claims(results)
    assert found[0].verdict == "disagrees"
    assert found[0].comparisons[0].measured == f"{init} diverged in 2 of 2 seeds"
    lost = "disagrees" if init == "balanced" else "agrees"
    assert found[2].verdict == lost


def test_what_was_not_run_is_not_tested(tmp_path):
    alone = fake_study(tmp_path, methods=("path-sgd",), inits=("balanced",), epochs=3)
    assert verdicts(alone) == ["not tested"] * 7
    missing = [claim.not_run for claim in judge_claims(alone)]
    assert missing[0] == ["the unbalanced start"]
    assert missing[1] == ["SGD", "AdaGrad", "the unbalanced start"]
    assert missing[4] == ["SGD", "AdaGrad", "with dropout"]
    assert missing[5] == ["SGD", "the unbalanced start"]
    said = " ".join(describe_claims(judge_claims(alone)).split())
    assert "Not run: SGD, AdaGrad, with dropout." in said


def test_runs_that_diverge_lose(tmp_path):
    """Every seed of SGD from the unbalanced start and of balanced AdaGrad; one seed of balanced SGD."""
    ends = {("sgd", "unbalanced", 0): 2, ("sgd", "unbalanced", 1): 3, ("sgd", "balanced", 1): 3}
    ends |= {("adagrad", "balanced", k): 1 for k in range(2)}
    results = fake_study(tmp_path, datasets=("mnist",), diverged=ends, repeats=2)
    found = judge_claims(results)
    harmed = find(found, 2, "mnist, SGD, unbalanced / balanced")
    assert harmed.by_seed == "unbalanced diverged, both diverged"
    assert harmed.verdict == "cannot be told"  # one pair is left
    assert find(found, 2, "mnist, AdaGrad, unbalanced / balanced").verdict == "disagrees"
    for number, sign in ((3, "/"), (4, "-")):
        assert find(found, number, f"mnist, Path-SGD {sign} AdaGrad").verdict == "agrees"
        assert find(found, number, f"mnist, Path-SGD {sign} SGD").verdict == "cannot be told"
    text = str(tabulate_results(results))
    assert [word for word in ("2 of 2", "1 of 2") if word in text] == ["2 of 2", "1 of 2"]
    assert "[2.13%]" in str(tabulate_choices(results.choices))
    assert describe_claims(found).splitlines()[2].startswith("1. ")


def test_figure_1_is_judged_on_mnist_where_it_is_there(tmp_path):
    for datasets in (("cifar10", "mnist"), ("cifar10", "svhn")):
        found = judge_claims(fake_study(tmp_path / datasets[1], datasets=datasets, repeats=2))[5]
        where = [c.where for c in found.comparisons if c.where.startswith("(a)")]
        assert len(where) == (1 if "mnist" in datasets else 2)
        assert found.verdict == "agrees"


def test_further_seeds(tmp_path):
    results = fake_study(tmp_path, datasets=("mnist",), dropouts=(0.0, 0.5), repeats=3, more_repeats=2)
    asked = {Cell("mnist", 0.0, "balanced", name) for name in ("path-sgd", "sgd", "adagrad")}
    assert find_undecided(results) == asked  # claim 4; with dropout the paper excepts MNIST
    for choice in results.choices:
        if choice.cell in asked and choice.cell.method != "adagrad":
            runs = choice.more_runs(results.study, results.data["mnist"].checksum)
            assert [run.seed.init for run in runs] == [3, 4]
            for run in runs:
                folder = RunFolder(tmp_path / "runs", run)
                folder.begin(results.finals[choice.cell][0].lines)
                folder.end("done", "", 1.0, False)
    more = StudyResults.load(tmp_path)
    assert more.seeds == "3 to 5"
    counts = [len(c.by_seed.split(",")) for c in judge_claims(more)[3].comparisons]
    assert counts == [5, 3]  # AdaGrad has none to pair them with
    assert find_undecided(more) == asked, "an interrupted study ends with the same runs"
    fewer = dataclasses.replace(results.study, more_repeats=0)
    write_json(tmp_path / "study.json", dataclasses.asdict(fewer))
    found = StudyResults.load(tmp_path)
    assert found.finals == results.finals


def test_final_and_best_errors(tmp_path):
    results = fake_study(tmp_path, methods=("sgd",), inits=("balanced",), epochs=6)
    ((record,),) = results.finals.values()
    for line, error in zip(record.lines, [0.9, 0.5, 0.1, 0.2, 0.3, 0.2, 0.2], strict=True):
        line["test_error"] = error
    (row,) = tabulate_results(results).rows
    assert row[-3:] == ["20.00%", "10.00%", ""]  # epochs 2 to 6, epoch 2, none diverged


def test_epochs_to_a_training_loss(tmp_path):
    results = fake_study(tmp_path, methods=("sgd", "path-sgd"), repeats=2, epochs=3)
    for cell, runs in results.finals.items():
        for run in runs:  # a seed is the faster, the later it is
            losses = [2.3, 0.9, 0.05 if run.run.seed.init else 0.5, 0.2 if cell.method == "sgd" else 0.02]
            for line, loss in zip(run.lines, losses, strict=True):
                line["train_loss"] = loss
    (table,) = tabulate_epochs(results)
    assert table.head[4:] == ["1", "0.3", "0.1", "0.03"]  # no run comes to 0.01
    assert [row[2:] for row in table.rows] == [
        ["balanced", "SGD", "1", "2 to 3", "", ""],
        ["balanced", "Path-SGD", "1", "2 to 3", "2 to 3", "3"],
    ]


def test_a_note_on_the_data_is_shown(tmp_path):
    fake_study(tmp_path, epochs=2)
    (tmp_path / "note.txt").write_text("The digits are upside down.\n")
    tables = summarize_study(StudyResults.load(tmp_path)).split("\n\n")
    assert tables[1].endswith("\nThe digits are upside down.")  # of the data sets


def test_the_edge_of_what_was_tried_is_said():
    cell = Cell("mnist", 0.0, "balanced", "sgd")
    tried = [Trial(10.0**-a, "done", 0.02, 3, "", "x") for a in range(3)]
    said = [str(Choice(cell, one.step_size, tried)) for one in tried]
    assert ["largest tried" in text for text in said] == [True, False, False]
    assert ["smallest tried" in text for text in said] == [False, False, True]
    assert "largest" not in str(Choice(cell, 1.0, tried[:2])), "of two each is an edge"


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """As in `python -m study data | head`."""
    command = [sys.executable, "-m", "study", "data", "--data-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=120) == 141
