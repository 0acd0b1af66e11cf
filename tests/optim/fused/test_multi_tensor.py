"""Plain steps of any network by one kernel over all tensors, against the reference; here interpreted."""

from __future__ import annotations

import copy

import pytest
import torch

from pathsgd import PathSGD
from pathsgd.graph.path_graph import remember_model
from pathsgd.optim import gamma_cache, measurement
from pathsgd.optim.fused.gpu import multi_tensor
from pathsgd.optim.fused.gpu.multi_tensor_kernel import OUTER, PLAIN, STRIDED
from support import cases
from support.measure_again import capture_on_cpu
from support.networks import Transformer, Vgg
from support.plain_steps import (
    EVENTS,
    OPTIMIZERS,
    assert_same,
    both_ways,
    by_turns,
    channels_last,
    check_rescaled_copies,
    in_place,
    last_axis_first,
    run,
    schedule,
    start,
    unalign,
    unaligned,
    write_weights,
)

KINDS = {kind.value for kind in (PLAIN, OUTER, STRIDED)}


def tensors_of(optimizer):
    return optimizer._dispatch._tensors


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_kernel_takes_the_same_steps(name):
    found, expected = both_ways(OPTIMIZERS[name])
    assert_same(found, expected)
    assert set(tensors_of(found[1]).tiles) == KINDS


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_step_that_is_captured_measures_once(implementation, monkeypatch):
    """Nothing is kept from step to step then, and groups and kernels all ask for gamma."""
    model, graph = start()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "lr": 1e-3}]
    optimizer = PathSGD(groups, graph=graph, lr=1e-2, implementation=implementation)
    measured = []
    measure = measurement.GammaMeasurement.run

    def count(*arguments):
        measured.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(measurement.GammaMeasurement, "run", count)
    monkeypatch.setattr(gamma_cache, "is_capturing", lambda: True)
    run(model, optimizer, steps=2)
    assert len(measured) == 2


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_every_case(case):
    def build():
        return cases.build(case).float(), cases.traced(case)

    assert_same(*both_ways(lambda m, g, **more: OPTIMIZERS["AdamW"](m, g, lr=1e-4, **more), build))


@pytest.mark.parametrize(("network", "name"), [(Vgg, "momentum"), (Vgg, "AdamW"), (Transformer, "Adam")])
def test_rescaled_copies_and_repeated_runs_give_the_same_bits(network, name):
    check_rescaled_copies(network, name, "triton")


@pytest.mark.parametrize("place", [last_axis_first, unaligned, by_turns])
def test_gradients_in_any_layout(place):
    assert_same(*both_ways(OPTIMIZERS["momentum"], place=place))


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_weights_in_any_layout(name):
    found, expected = both_ways(OPTIMIZERS[name], to=channels_last)
    assert not found[1].gamma_cache.model.conv.weight.is_contiguous()
    assert_same(found, expected)


@pytest.mark.parametrize("event", EVENTS)
def test_what_changes_between_steps_is_noticed(event, monkeypatch):
    """Also if gammas come in the same tensors, as they do from a CUDA graph."""
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(gamma_cache, "WARM_UP", 0)
    made, make = [], multi_tensor.MultiTensorStep
    monkeypatch.setattr(multi_tensor, "MultiTensorStep", lambda *own: made.append(1) or make(*own))
    assert_same(*both_ways(OPTIMIZERS["AdamW"], steps=4, between=event, place=in_place))
    # The first step measures; from the second on gammas lie in the same place.
    assert len(made) == {schedule: 2, write_weights: 2, unalign: 3}.get(event, 4)


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_groups_differ_and_some_parameters_rest(name):
    def make(model, graph, **options):
        first, *rest = model.parameters()
        rest[-1].requires_grad_(False)
        groups = [{"params": [first], "lr": 0.1, "weight_decay": 0.2}, {"params": rest}]
        return OPTIMIZERS[name](groups, graph, **options)

    assert_same(*both_ways(make))


def double_precision(name, model, graph):
    return OPTIMIZERS[name](model.double(), graph, implementation="triton")


def limited(name, model, graph):
    return OPTIMIZERS[name](model, graph, implementation="triton", max_relative_step=0.1)


def incompatible_groups(name, model, graph):
    first, *rest = model.parameters()
    option = {"betas": (0.5, 0.9)} if name == "AdamW" else {"momentum": 0.5}
    return OPTIMIZERS[name]([{"params": [first], **option}, {"params": rest}], graph, implementation="triton")


@pytest.mark.parametrize("make", [double_precision, limited, incompatible_groups])
@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_what_the_kernel_does_not_know_it_leaves(name, make):
    model, graph = start()
    optimizer = make(name, model, graph)
    run(model, optimizer, 1)
    assert set(optimizer.implementations.values()) == {"reference"}


def test_a_base_with_hooks_is_called():
    model, graph = start()
    optimizer = OPTIMIZERS["AdamW"](model, graph, implementation="triton")
    called = []
    optimizer.base.register_step_post_hook(lambda *_: called.append(1))
    run(model, optimizer)
    assert len(called) == 2


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_a_resumed_training_is_the_uninterrupted_one(name):
    model, graph = start()
    optimizer = OPTIMIZERS[name](model, graph, implementation="triton")
    run(model, optimizer)
    resumed, other = copy.deepcopy(model), copy.copy(graph)
    remember_model(other, resumed)
    loaded = OPTIMIZERS[name](resumed, other, implementation="triton")
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ends = [run(m, o, first=2) for m, o in ((model, optimizer), (resumed, loaded))]
    assert torch.equal(*ends)


def test_writes_are_counted():
    """By torch, so that a backward pass through weights that have moved is an error."""
    model, graph = start()
    optimizer = OPTIMIZERS["PathSGD"](model, graph, implementation="triton")
    before = [p._version for p in model.parameters()]
    run(model, optimizer, 1)
    assert all(p._version > count for p, count in zip(model.parameters(), before, strict=True))


def test_a_captured_step_has_a_table_of_its_own(monkeypatch):
    """Steps outside of the graph write theirs; with ``refresh_every`` both have the same gammas."""
    model, graph = start()
    optimizer = OPTIMIZERS["PathSGD"](model, graph, implementation="triton", refresh_every=4)
    tables = []
    for k, capturing in enumerate((False, True, False)):
        monkeypatch.setattr(multi_tensor, "is_capturing", lambda: capturing)  # noqa: B023
        run(model, optimizer, 1, first=k, place=in_place)
        tables.append(tensors_of(optimizer).table)
    assert tables[1] is not tables[0]
    assert tables[2] is not tables[1]
