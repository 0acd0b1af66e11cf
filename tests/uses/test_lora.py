"""``benchmarks/uses/lora``, in small: an untrained Llama of one layer, on random bytes."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import pathsgd
from benchmarks.league.seen import Causal
from benchmarks.league.tasks import Text
from benchmarks.uses.lora import (
    METHODS,
    STARTS,
    Study,
    add_pairs,
    balance_pairs,
    rescale_pairs,
    train,
)

FACTORS = (2.0**-10, 2.0**10)


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    return Causal(
        "llama", 16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16,
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def task():
    letters = torch.randint(256, (400,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Text(dict.fromkeys(("train", "valid", "test"), letters), steps=8, batch=2, context=16, pieces=2)


@pytest.fixture(scope="module")
def graph(base, task):
    return pathsgd.trace(add_pairs(base, 4, 0), task.example)


def make(base, start):
    """Pairs as peft makes them, or with a B that is not zero."""
    model = add_pairs(base, 4, 0)
    if start != STARTS[0]:
        for _, b in pairs(model):
            torch.nn.init.normal_(b, std=0.1)
    return model


def pairs(model):
    named = dict(model.named_parameters())
    return [(named[name], named[name.replace("lora_A", "lora_B")]) for name in named if "lora_A" in name]


def frozen(model):
    return [p for p in model.parameters() if not p.requires_grad]


def trained_from(base, graph, task, start, scale, method):
    """The pairs' B, after some steps, where the pairs were rescaled before."""
    model = make(base, start)
    rescale_pairs(model, scale)
    train(model, METHODS[method].make(model, graph, METHODS[method].rate or 1e-2), task, seed=0)
    return torch.cat([b.detach().flatten() for _, b in pairs(model)])


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("method", METHODS)
def test_balanced_pairs_learn_alike_to_the_last_bit_and_others_do_not(base, graph, task, start, method):
    plain, *others = (trained_from(base, graph, task, start, s, method) for s in (1.0, *FACTORS))
    assert plain.all()  # all have learnt
    is_same = [torch.equal(plain, other) for other in others]
    assert is_same == [method not in ("adamw", "lora+")] * 2


@pytest.mark.parametrize("start", STARTS)
def test_scales_do_not_change_the_function_and_only_pairs_are_balanced(base, graph, task, start):
    model = make(base, start)
    expected, before = model(task.example), copy.deepcopy(frozen(model))
    rescale_pairs(model, 1e3)
    torch.testing.assert_close(model(task.example), expected)
    balance_pairs(model, graph)
    torch.testing.assert_close(model(task.example), expected)
    assert all(map(torch.equal, frozen(model), before))
    for a, b in pairs(model):
        norms = a.norm(dim=1)
        torch.testing.assert_close(norms, torch.ones(4) if start == STARTS[0] else b.norm(dim=0))


def test_the_pairs_alone_fit_the_base(base, graph, task):
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model = make(base, STARTS[0])
    train(model, METHODS["balance"].make(model, graph, 1e-2), task, seed=0)
    loaded = add_pairs(base, 4, seed=1)
    set_peft_model_state_dict(loaded, get_peft_model_state_dict(model))
    assert torch.equal(loaded(task.example), model(task.example))


def test_a_search_finds_the_best_rate_wherever_it_is(task, monkeypatch):
    study = Study(pytest.fail, task, [], list)
    for best in (1.0, 3.2e-3, 1e-5, 3.2e-9):
        monkeypatch.setattr(
            study, "run", lambda *cell, best=best: {"valid": abs(math.log(cell[-1] / best)), "rate": cell[-1]}
        )
        assert study.search("adamw", STARTS[0], 8, 1.0)["rate"] == best


def test_runs_are_kept(base, task):
    rows = []
    study = Study(lambda: base, task, rows, list)
    row = study.run("muon", STARTS[0], 4, 1e3, 0, 0.09)
    again = Study(pytest.fail, task, rows, list)
    assert again.run("muon", STARTS[0], 4, 1e3, 0, 0.09) is row
    assert rows == [row]
