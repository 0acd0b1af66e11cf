"""Which method is first, in studies whose outcome is known by construction."""

import pytest

from study.config import Cell
from study.tables import make_tables, rank_methods, summarize_study
from support.fake_study import fake_study

METHODS = ("adam", "path-momentum", "momentum")


def make_study(out, epochs_to_loss, **options):
    """Losses of 2, then 0.1 from an epoch on, which is given for each seed of each method."""
    results = fake_study(
        out, datasets=("mnist",), methods=METHODS, inits=("balanced",), epochs=8, repeats=3, **options
    )
    for method, by_seed in epochs_to_loss.items():
        for run, reached in zip(cell_runs(results, method), by_seed, strict=True):
            for line in run.lines:
                line["train_loss"] = 0.1 if line["epoch"] >= reached else 2.0
    return results


def cell_runs(results, method):
    return results.finals[Cell("mnist", 0.0, "balanced", method)]


SPEEDS = {"adam": (4, 4, 5), "path-momentum": (2, 2, 2), "momentum": (2, 3, 2)}


def test_the_fastest_and_whom_it_cannot_be_told_from(tmp_path):
    (found,) = rank_methods(make_study(tmp_path, SPEEDS))
    speed = found.rankings[0]
    assert (speed.name, speed.first) == ("epochs to a training loss of 0.1", "path-momentum")
    assert found.epochs["adam"] == [4, 4, 5]
    assert speed.undecided == ["momentum"]
    # exp of the mean of log 2, log 2, log 2.5, and 4.3027 standard errors of 0.0744 around it
    assert speed.describe("adam") == "2.15 (1.56 to 2.97)"
    assert speed.describe("momentum") == "cannot be told: 1.14 (0.64 to 2.05)"
    assert speed.describe("path-momentum") == "first"


def test_the_lowest_at_the_end(tmp_path):
    results = make_study(tmp_path, SPEEDS)
    for method, loss, error in (("adam", 0.05, 0.03), ("path-momentum", 0.1, 0.02), ("momentum", 0.1, 0.02)):
        for run in cell_runs(results, method):
            for line in run.lines[-5:]:  # epochs 4 to 8
                line |= {"train_loss": loss, "test_error": error}
    _, loss, error = rank_methods(results)[0].rankings
    assert (loss.first, loss.undecided, error.first) == ("adam", [], "path-momentum")
    assert loss.describe("momentum") == "2 (2 to 2)"
    assert error.describe("adam") == "1.00 (1.00 to 1.00)"  # points
    assert error.undecided == ["momentum"]  # level in every seed


def test_a_method_with_a_seed_that_diverged_or_learned_nothing_is_not_first(tmp_path):
    """Nor does it choose the loss that is raced to."""
    fast, slow = {"path-momentum": (2, 2, 2)}, {"adam": (3, 3, 3), "momentum": (5, 5, 5)}
    diverged = make_study(tmp_path / "a", slow, diverged={("path-momentum", "balanced", 1): 3})
    stuck = make_study(tmp_path / "b", {**slow, **fast})
    for line in cell_runs(stuck, "path-momentum")[1].lines[1:]:
        line["train_loss"] = 1.01
    for results in (diverged, stuck):
        (found,) = rank_methods(results)
        speed = found.rankings[0]
        assert (speed.first, speed.undecided) == ("adam", ["path-momentum"])
        assert speed.describe("path-momentum") == "cannot be told: failed in 1 of 3 seeds"
        assert speed.name == "epochs to a training loss of 0.1"
        assert found.epochs["path-momentum"][1] is None


def test_methods_that_diverged_in_every_seed_are_behind(tmp_path):
    ends = {("adam", "balanced", k): 2 for k in range(3)}
    results = fake_study(
        tmp_path, methods=METHODS, inits=("balanced",), repeats=3, diverged=ends,
        unchosen=[("momentum", "balanced")],
    )  # fmt: skip
    speed = rank_methods(results)[0].rankings[0]
    assert (speed.first, speed.undecided) == ("path-momentum", [])
    assert {speed.describe(name) for name in ("adam", "momentum")} == {"failed in 3 of 3 seeds"}


def test_where_all_diverged_none_is_first(tmp_path):
    ends = {(name, "balanced", 0): 2 for name in METHODS}
    results = fake_study(tmp_path, methods=METHODS, inits=("balanced",), diverged=ends)
    rankings = rank_methods(results)[0].rankings
    assert [(one.first, one.behind) for one in rankings] == [(None, {})] * 3
    assert make_tables(results)[-1].rows[0][-2:] == ["none", "none"]


@pytest.mark.parametrize(("inits", "claims"), [(("balanced",), 0), (("balanced", "unbalanced"), 1)])
def test_one_start_is_ranked_and_two_are_judged(tmp_path, inits, claims):
    results = fake_study(tmp_path, datasets=("digits",), methods=METHODS, inits=inits, epochs=3)
    text = summarize_study(results)
    assert text.count("The paper's claims") == text.count("What the verdicts mean") == claims
    assert text.count("Which method is first") == text.count("Methods against the first") == 1 - claims
    powers_of_two = [path for path in (tmp_path / "runs").iterdir() if "powers-of-two" in path.name]
    assert len(powers_of_two) == claims  # of Path-SGD with momentum
