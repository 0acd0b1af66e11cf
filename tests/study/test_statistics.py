"""Student's t, intervals and verdicts against tables and by hand."""

import math

import pytest
from scipy import stats

from study.claims import (
    Effect,
    compare,
    compare_epochs,
    confidence_interval,
    count_epochs_to,
    find_common_loss,
    log_ratio,
    mean_of_last,
    measure,
)
from study.config import Run
from study.runs import RunRecord

INF, NAN = math.inf, math.nan


def test_the_interval_is_that_of_the_paired_t_test():
    first, second = [0.0151, 0.0149, 0.0153, 0.0144], [0.0142, 0.0146, 0.0139, 0.0141]
    found = confidence_interval([a - b for a, b in zip(first, second, strict=True)])
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert confidence_interval([1.0]) is None


def effect(*by_seed, above=-INF, below=INF):
    return Effect("test error, points", ("one", "other"), list(by_seed), above, below, ratio=False)


# Three seeds with mean 1 and standard deviation s: the interval is 1 -+ 4.3027 s / sqrt(3) = 1 -+ 2.484 s.
WIDE = (0.5, 1.0, 1.5)  # s = 0.5: from -0.24 to 2.24
NARROW = (0.8, 1.0, 1.2)  # s = 0.2: from 0.50 to 1.50


@pytest.mark.parametrize(
    ("by_seed", "bounds", "verdict"),
    [
        (NARROW, {"above": 0.4}, "agrees"),
        (NARROW, {"above": 0.6}, "cannot be told"),
        (NARROW, {"above": 1.6}, "disagrees"),
        (NARROW, {"below": 1.6}, "agrees"),
        (NARROW, {"below": 0.4}, "disagrees"),
        (WIDE, {"above": 0.0}, "cannot be told"),  # though all three are above
        (NARROW, {"above": 0.0, "below": 2.0}, "agrees"),
        (NARROW, {"above": 0.0, "below": 1.4}, "cannot be told"),
        (NARROW, {"above": 2.0, "below": 3.0}, "disagrees"),
        ((1.0,), {"above": 0.0}, "cannot be told"),  # one seed has no interval
        ((0.0, 0.0, 0.0), {"below": 0.0}, "cannot be told"),  # on the bound is on neither side
        ((INF, INF, INF), {"above": 0.0}, "agrees"),
        ((-INF, -INF, -INF), {"above": 0.0}, "disagrees"),
        ((-INF, -INF), {"below": 0.0}, "agrees"),
        ((INF, INF), {"above": -1.0, "below": 1.0}, "disagrees"),
        ((INF, 9.0, 9.0), {"above": 0.0}, "cannot be told"),  # some diverge and some do not
        ((INF, -INF, INF), {"above": 0.0}, "cannot be told"),
        ((INF, NAN, INF), {"above": 0.0}, "agrees"),  # where both diverge the pair does not count
        ((0.9, NAN, 1.1), {"below": -1.0}, "disagrees"),
        ((INF, NAN, NAN), {"above": 0.0}, "cannot be told"),
        ((INF,), {"above": 0.0}, "cannot be told"),
        ((NAN, NAN), {"above": 0.0}, "cannot be told"),
    ],
)
def test_the_rule(by_seed, bounds, verdict):
    assert effect(*by_seed, **bounds).verdict == verdict
    assert compare("here", [], effect(*by_seed, **bounds)).verdict == verdict


def test_one_of_two_effects_is_enough_to_agree_and_both_are_needed_to_disagree():
    good, open_, bad = (effect(*NARROW, above=bound) for bound in (0.4, 0.6, 1.6))
    assert compare("", [], bad, good).verdict == "agrees"
    assert compare("", [], bad, open_).verdict == "cannot be told"
    assert compare("", [], bad, bad).verdict == "disagrees"


def test_more_seeds_are_asked_for_where_half_the_interval_would_tell():
    # WIDE is from -0.24 to 2.24, half of that from 0.38 to 1.62.
    assert compare("", [], effect(*WIDE, above=0.3)).note == "more seeds may tell"
    assert compare("", [], effect(*WIDE, above=0.4)).note == ""
    assert compare("", [], effect(*WIDE, above=-1.0)).note == ""  # told already
    assert compare("", [], effect(1.0, above=0.3)).note == ""
    assert compare("", [], effect(*WIDE, above=0.3), counts=False).note == (
        "not part of the claim, more seeds may tell"
    )


def test_what_is_said():
    ratio = Effect("epochs ratio", ("Path-SGD", "SGD"), [math.log(2), math.log(2)], below=0.0)
    found = compare("mnist", [], ratio)
    assert (found.measured, found.by_seed, found.agrees_if) == ("epochs ratio 2 (2 to 2)", "2, 2", "below 1")
    assert effect(0.01).describe() == "test error, points 1.00, one seed: no interval"
    assert effect(INF, -INF, 0.01).describe() == "one diverged in 1 and other diverged in 1 of 3 seeds"
    assert effect(INF, -INF, NAN, 0.01).describe_seeds() == (
        "one diverged, other diverged, both diverged, 1.00"
    )
    assert effect(NAN, NAN).describe() == "both diverged in every seed"
    assert effect(1.0, above=-0.005, below=0.005).describe_bounds() == "from -0.50 to 0.50"
    twice = compare("", [], effect(INF, INF, above=0.0), effect(INF, INF, above=1.0))
    assert twice.measured == "one diverged in 2 of 2 seeds"


def record(losses, status="done"):
    lines = [{"epoch": k, "train_loss": loss, "test_error": loss / 10} for k, loss in enumerate(losses)]
    return RunRecord(Run(), status, lines)


def test_effects_of_pairs():
    fast, slow = record([9.0, 3.0, 2.0, 1.0]), record([9.0, 4.0, 3.0, 2.0])
    assert find_common_loss([fast, slow]) == 2.0
    assert [count_epochs_to(loss, slow) for loss in (9.0, 4.0, 3.5, 1.9)] == [1, 1, 2, None]
    lost = record([9.0, NAN], "diverged")
    pairs = [(fast, slow), (lost, slow), (fast, None), (lost, None)]
    found = measure(pairs, compare_epochs)
    assert found[:3] == [math.log(2 / 3), INF, -INF]
    assert math.isnan(found[3])
    assert log_ratio(0.0, 0.0) == 0.0
    assert log_ratio(0.1, 0.0) > 20


def test_the_last_five_epochs_without_the_state_before_the_first_step():
    assert mean_of_last(record([99.0, *range(1, 9)]), "train_loss") == 6.0
    assert mean_of_last(record([99.0, 2.0, 4.0]), "train_loss") == 3.0
