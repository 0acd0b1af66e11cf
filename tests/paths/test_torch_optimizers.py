"""Every optimizer torch has, with every set of options torch's own tests try, in the geometry of paths.

The optimizers, their options and the errors they must raise come from torch's test database, so a new
option of torch's is tried here too.
"""

from __future__ import annotations

import copy
import functools
import io
import re

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import (
    get_error_inputs_for_all_optims,
    optim_db,
    optim_inputs_func_sgd,
)
from torch.utils._pytree import tree_map_only

import pathsgd
from pathsgd import PathNormalized, PathSGD
from pathsgd.graph.path_graph import remember_model
from support.networks import Mlp, build
from support.training import unchanged, weights

CASES = {}
for config in optim_inputs_func_sgd("cpu"):
    if not {"dampening", "foreach", "differentiable"} & set(config.kwargs):  # PathSGD has none of these
        CASES[f"PathSGD {config.desc}"] = (PathSGD, config.kwargs)
for info in optim_db:
    if info.only_supports_sparse_grads:
        continue
    for config in info.optim_inputs_func("cpu"):
        if not (config.kwargs.get("capturable") or config.kwargs.get("fused")):  # those need a GPU
            CASES[f"{info.optim_cls.__name__} {config.desc}"] = (info.optim_cls, config.kwargs)

MUON = getattr(torch.optim, "Muon", None)  # since torch 2.9
WITH_DECAY = (torch.optim.AdamW, MUON, torch.optim.ASGD)
"""Those that decay weights if nothing is said."""

every = pytest.mark.parametrize("case", CASES)


def parameters(model, cls):
    """All of them, but Muon takes matrices only."""
    return [p for p in model.parameters() if p.dim() == 2 or cls is not MUON]


@functools.cache
def traced():
    return pathsgd.trace(build(Mlp)[0])


def make(case, model, named=False, **options):
    cls, kwargs = CASES[case]
    kwargs = {**copy.deepcopy(kwargs), **options}
    graph = copy.copy(traced())
    remember_model(graph, model)  # one trace serves all the copies of the network
    params = parameters(model, cls)
    if named:
        names = {id(p): name for name, p in model.named_parameters()}
        params = [(names[id(p)], p) for p in params]
    if cls is PathSGD:
        return PathSGD(params, graph=graph, **kwargs)
    return PathNormalized(cls, params, graph=graph, **kwargs)


def run(model, optimizer, x, steps):
    losses = []
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


@every
def test_it_goes_the_right_way(case):
    model, x = build(Mlp)
    # L-BFGS without a line search goes astray if its steps are too short to see a curvature by.
    optimizer = make(case, model, **({} if CASES[case][0] is torch.optim.LBFGS else {"lr": 1e-4}))
    losses = run(model, optimizer, x, 5)
    maximize = CASES[case][1].get("maximize", False)
    assert (losses[-1] > losses[0]) if maximize else (losses[-1] < losses[0])
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert "lr" in repr(optimizer)


@every
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_state_dicts_load_whether_named_or_not(case, named):
    model, x = build(Mlp)
    optimizer = make(case, model, named=named)
    run(model, optimizer, x, 2)
    assert ("param_names" in optimizer.state_dict()["param_groups"][0]) == named
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    expected = copy.deepcopy(model)
    same = make(case, expected, named=named)
    same.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(expected, same, x, 2)
    for into in (False, True):
        file.seek(0)
        other = copy.deepcopy(model)
        resumed = make(case, other, named=into)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        run(other, resumed, x, 2)
        assert unchanged(other, weights(expected))


@every
def test_no_gradient_is_no_step(case):
    cls, kwargs = CASES[case]
    model, _ = build(Mlp)
    optimizer = make(case, model)
    before = weights(model)
    optimizer.zero_grad()
    optimizer.step(lambda: torch.tensor(1.0)) if cls is torch.optim.LBFGS else optimizer.step()
    assert unchanged(model, before)
    if kwargs.get("weight_decay", 0) or cls in WITH_DECAY or cls is torch.optim.LBFGS:
        return  # decay moves without a gradient
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert unchanged(model, before)


@every
def test_copies_have_all_that_is_public(case):
    model, x = build(Mlp)
    optimizer = make(case, model)
    run(model, optimizer, x, 1)

    def public(o):
        return {name for name in o.__dict__ if not name.startswith("_")}

    assert public(copy.deepcopy(optimizer)) == public(optimizer)


def in_place_of(params, model):
    """The same form with parameters of the model, equal ones for equal ones: duplicates are an error too."""
    own = iter(model.parameters())
    return tree_map_only(nn.Parameter, functools.cache(lambda _: next(own)), params)


def test_errors_are_those_of_torch():
    model, _ = build(Mlp)
    graph = pathsgd.trace(model)
    tried = 0
    for error in get_error_inputs_for_all_optims("cpu", torch.float64):
        params = error.optimizer_error_input.params
        params = list(model.parameters()) if params is None else in_place_of(params, model)
        options = {"lr": 1e-2, **error.optimizer_error_input.kwargs}
        expected = re.compile(error.error_regex)
        for cls in (PathSGD, lambda *a, **k: PathNormalized(torch.optim.SGD, *a, **k)):
            if error.error_type is UserWarning:
                with pytest.warns(UserWarning, match=expected):
                    cls(params, graph=graph, **options)
            else:
                with pytest.raises(error.error_type, match=expected):
                    cls(params, graph=graph, **options)
            tried += 1
    assert tried >= 10
