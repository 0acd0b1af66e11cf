"""Configurations: what they refuse, and the names of runs, which recorded results depend on."""

import dataclasses

import pytest

from pathsgd import PathError
from study.config import Seeds, Study
from support.short_runs import SMALL


def test_a_run_is_named_by_all_its_numbers_depend_on():
    names = {SMALL.name}
    for changes in ({"step_size": 0.2}, {"p": 1.0}, {"seed": Seeds(order=1)}, {"data": "x"}, {"epochs": 4}):
        names.add(dataclasses.replace(SMALL, **changes).name)
    assert len(names) == 6
    assert "/" not in dataclasses.replace(SMALL, dataset="a/b=../c.npz").name


@pytest.mark.parametrize(
    "wrong",
    [{"step_size": 0.0}, {"step_size": float("nan")}, {"step_size": 1e300}, {"dropout": 1.0}, {"hidden": ()},
     {"batch": 0}, {"epochs": 0}, {"validation": -1}, {"p": 0.5}, {"p": float("inf")}, {"grace": -1},
     {"seed": Seeds(order=1 << 63)}, {"net": "rnn"}],
    ids=str,
)  # fmt: skip
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(PathError, match="Invalid"):
        dataclasses.replace(SMALL, **wrong)


def test_a_study_refuses_what_its_runs_would():
    for wrong in ({"methods": ("sdg",)}, {"methods": ()}, {"dropouts": (0.0, 1.0)}, {"repeats": 0},
                  {"more_repeats": -1}, {"validation": 0}, {"more_repeats": 1, "inits": ("balanced",)},
                  {"datasets": ("a=1.npz", "a=2.npz")}, {"seed": 1 << 70}):  # fmt: skip
        with pytest.raises(PathError):
            Study(**wrong)
