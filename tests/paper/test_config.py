"""Configurations: what they refuse, and the names of runs, which recorded results depend on."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from dataclasses import dataclass
from itertools import pairwise

import pytest

from pathsgd import PathError
from pathsgd.paper import Run, Seeds, Setup, Study
from pathsgd.paper.config import StudySetup
from pathsgd.paper.config_json import from_json
from pathsgd.paper.optimizers import METHODS

SMALL = Run(hidden=(12, 12), epochs=3, step_size=0.1)


def test_a_run_is_named_by_all_its_numbers_depend_on():
    names = {SMALL.name}
    for changes in ({"step_size": 0.2}, {"p": 1.0}, {"seed": Seeds(order=1)}, {"data": "x"}, {"epochs": 4}):
        names.add(dataclasses.replace(SMALL, **changes).name)
    assert len(names) == 6
    assert "/" not in dataclasses.replace(SMALL, dataset="a/b=../c.npz").name


@dataclass(frozen=True)
class LaterSeeds(Seeds):
    noise: int = 0


@dataclass(frozen=True)
class LaterRun(Run):
    """A run with fields that were added after runs had been recorded."""

    warmup: int = 0
    schedule: list[float] = dataclasses.field(default_factory=list)


def test_a_new_field_changes_names_only_off_its_default():
    values = {field.name: getattr(SMALL, field.name) for field in dataclasses.fields(Run)}
    later = LaterRun(**values)
    assert later.name == SMALL.name
    names = {SMALL.name} | {LaterRun(**values, **new).name for new in ({"warmup": 1}, {"schedule": [0.1]})}
    for noise in (0, 1):
        names.add(LaterRun(**{**values, "seed": LaterSeeds(noise=noise)}).name)
    assert len(names) == 4


def test_the_founding_fields_are_never_added_to():
    """A field that joins them orphans every recorded run: leave the new field out of them."""
    assert sorted(Run.FOUNDING_FIELDS) == [
        "batch", "centre", "data", "dataset", "dropout", "epochs", "grace", "hidden", "init", "method", "net",
        "p", "seed", "step_size", "tf32", "validation",
    ]  # fmt: skip
    assert sorted(Seeds.FOUNDING_FIELDS) == ["dropout", "init", "order", "rescaling", "split"]


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
    with pytest.raises(PathError, match="checkpoint-seconds"):
        Setup(checkpoint_seconds=-1.0)


@pytest.mark.parametrize("config", [Run, Seeds, Study, Setup, StudySetup])
def test_every_field_is_documented(config):
    """By the string literal under it."""
    docs = {}
    for base in reversed(config.__mro__[:-1]):
        (tree,) = ast.parse(inspect.getsource(base)).body
        for field, text in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[field.target.id] = text.value.value
    assert {field.name for field in dataclasses.fields(config)} <= set(docs)
    for name in ("method", "methods"):
        assert all(method in docs[name] for method in METHODS if name in docs)


def test_configurations_come_back_from_json():
    study = Study(hidden=(3,), dropouts=(0.0,))
    assert from_json(Study, dataclasses.asdict(study), "here") == study
    assert from_json(Run, {}, "here") == Run()
