"""Rounds of balancing and the entries that are remembered: each by kernels (here by Triton's interpreter), by
torch, and written down anew, entry by entry."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import pathsgd
from pathsgd import BalancedMuon
from pathsgd.balancing.rescale import apply_factors
from pathsgd.graph.unit_relations import Relations, Terms, join_terms
from pathsgd.muon.round import EVERY, MAX_FACTOR, POWERS, Round, list_places
from support import cases, networks, starts
from support.networks import Convolutions, Mlp, Packed, PreActivation, Recurrent, Transformer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = [Mlp, Recurrent, Transformer, PreActivation, cases.Residual]
"""Networks whose units are rows and columns, as kernels want them."""
NETWORKS = [*PLAIN, Convolutions, Packed, starts.Squares, starts.DeadChain, starts.TiedTable]


def train(network, dtype=torch.float32, steps=2, spread=0.3):
    """(optimizer after some steps, its upkeep), with units rescaled a little since."""
    known = network in starts.NETWORKS
    model, x = starts.build(network) if known else networks.build(network, torch.float64)
    graph = starts.traced(network) if known else pathsgd.trace(model, x)
    model, x = model.to(DEVICE, dtype), x.to(DEVICE, dtype if x.is_floating_point() else None)
    optimizer = BalancedMuon(model.train(network is Recurrent), graph)  # cudnn wants that of an RNN
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
    upkeep = optimizer._upkeep
    generator = torch.Generator().manual_seed(0)
    drawn = spread * torch.randn(upkeep.units.count, generator=generator, dtype=torch.float64)
    factors = torch.exp2(2 * drawn.round()) if dtype == torch.bfloat16 else drawn.exp()
    apply_factors(dict(model.named_parameters()), upkeep.units, torch.where(upkeep.held, 1, factors))
    return optimizer, upkeep


def make_round(kind, upkeep):
    edges = {n: upkeep.units.parameters[n] for n in upkeep.parameters}
    return kind(upkeep.parameters, edges, upkeep.units.relations, upkeep.held)


def collect(optimizer, upkeep):
    """Weights and state, in fp64."""
    tensors = {}
    for name, p in upkeep.parameters.items():
        tensors[name] = p.detach().double().clone()
        for key in POWERS.keys() & optimizer.state[p].keys():
            tensors[name, key] = optimizer.state[p][key].double().clone()
    return tensors


def round_by_entries(optimizer, upkeep):
    """Weights and state after a round: sums of squares over all entries by the classes at their ends."""
    tensors, units = collect(optimizer, upkeep), upkeep.units
    grows, shrinks = torch.zeros(2, units.count, dtype=torch.float64)
    terms, rate = units.relations.terms, units.relations.rate
    ends, exact = {}, torch.zeros(units.count, dtype=torch.bool)
    for name, p in upkeep.parameters.items():
        edge = units.parameters[name]
        head, tail = (ids.expand(p.shape).flatten() for ids in (edge.head, edge.tail))
        square = tensors[name].cpu().flatten().square()
        for of, by, power in zip(*map(Tensor.tolist, (terms.of, terms.by, terms.power)), strict=True):
            up, down = (grows, shrinks) if power > 0 else (shrinks, grows)
            up[by] += abs(power) * square[head == of].sum()
            down[by] += abs(power) * square[tail == of].sum()
        ends[name] = head, tail
        if p.dtype == torch.bfloat16:
            exact[head] = exact[tail] = True
    exact[terms.by[exact[terms.of]]] = True
    logs = torch.zeros(units.count, dtype=torch.float64)
    for k in units.free.tolist():
        if not upkeep.held[k] and grows[k] > 0 and shrinks[k] > 0:
            factor = (shrinks[k] / grows[k]) ** (1 / (4 * (1 + rate[k])))
            log = factor.clamp(1 / MAX_FACTOR, MAX_FACTOR).log2()
            logs[k] = log.round() if exact[k] else log
    factors = units.relations.complete(logs).exp2()
    for key, tensor in tensors.items():
        name, power = key if isinstance(key, tuple) else (key, None)
        head, tail = ends[name]
        factor = (factors[head] / factors[tail]).reshape(tensor.shape).to(tensor.device)
        tensor *= factor ** (1 if power is None else POWERS[power])
    return tensors


def check_same(actual, expected, rtol=1e-5):
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=rtol, atol=1e-7, msg=str(key))


@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_round_is_that_of_all_entries(network, spread):
    """Also of units that are far apart, which no round rescales by more than MAX_FACTOR."""
    optimizer, upkeep = train(network, spread=spread)
    before, expected = collect(optimizer, upkeep), round_by_entries(optimizer, upkeep)
    make_round(Round, upkeep).run(optimizer.state, EVERY)
    check_same(collect(optimizer, upkeep), expected)
    assert any(not torch.equal(before[key], tensor) for key, tensor in expected.items())


def test_a_round_in_16_bits_is_by_powers_of_two():
    optimizer, upkeep = train(Mlp, torch.bfloat16, spread=2.0)
    before, expected = collect(optimizer, upkeep), round_by_entries(optimizer, upkeep)
    make_round(Round, upkeep).run(optimizer.state, EVERY)
    check_same(collect(optimizer, upkeep), expected, rtol=0)
    assert any(not torch.equal(before[key], tensor) for key, tensor in expected.items())


def test_rounds_lead_to_the_balance_and_keep_the_function():
    optimizer, upkeep = train(Mlp, torch.float64, spread=2.0)
    model, x = optimizer._lazy_graph.model, networks.build(Mlp)[1].to(DEVICE)
    balanced, y = copy.deepcopy(model), model(x)
    pathsgd.balance(balanced, upkeep.graph)
    rounds = make_round(Round, upkeep)
    for steps in range(200 * EVERY):
        rounds.run(optimizer.state, steps)
    torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)
    for p, q in zip(model.parameters(), balanced.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("network", PLAIN if DEVICE == "cpu" else [Mlp, Transformer])
def test_kernels_do_the_same_round(network, captured, monkeypatch):
    """When it is due: in a CUDA graph by the number of steps that is on the device, not that of the host."""
    from pathsgd.muon.gpu import upkeep as module

    optimizer, upkeep = train(network)
    kernels = make_round(module.KernelUpkeep, upkeep)
    assert kernels.is_supported
    before, expected = collect(optimizer, upkeep), round_by_entries(optimizer, upkeep)
    versions = [p._version for p in upkeep.parameters.values()]
    kernels.run(optimizer.state, 3 * EVERY - 2)
    check_same(collect(optimizer, upkeep), before, rtol=0)
    monkeypatch.setattr(module, "is_capturing", lambda: captured)
    kernels.run(optimizer.state, EVERY if captured else 3 * EVERY - 1)
    check_same(collect(optimizer, upkeep), before, rtol=0)
    kernels.run(optimizer.state, 1 if captured else 3 * EVERY)
    check_same(collect(optimizer, upkeep), expected)
    assert kernels.steps == 3 * EVERY
    assert all(p._version > v for p, v in zip(upkeep.parameters.values(), versions, strict=True))
    # State that lies somewhere else by now is looked for again.
    for p in upkeep.parameters.values():
        optimizer.state[p] = copy.deepcopy(optimizer.state[p])
    monkeypatch.setattr(module, "is_capturing", lambda: False)
    expected = round_by_entries(optimizer, upkeep)
    kernels.run(optimizer.state, 4 * EVERY)
    check_same(collect(optimizer, upkeep), expected)


def test_kernels_leave_units_that_are_neither_rows_nor_columns():
    """A grouped kernel's inputs change along both."""
    from pathsgd.muon.gpu.upkeep import KernelUpkeep

    _, upkeep = train(Convolutions)
    assert not make_round(KernelUpkeep, upkeep).is_supported
    _, upkeep = train(Mlp, torch.float64)
    assert not make_round(KernelUpkeep, upkeep).is_supported


@pytest.mark.parametrize("network", [Mlp, Transformer, Convolutions])
def test_a_kernel_reads_the_entries_that_are_remembered(network):
    """Wherever they lie in memory."""
    from pathsgd.muon.gpu.upkeep import KernelGather

    optimizer, upkeep = train(network)
    parameters = list(upkeep.parameters.values())
    for p in parameters:
        if p.dim() > 1:
            p.data = p.detach().movedim(1, -1).contiguous().movedim(-1, 1).mT.contiguous().mT
    states = [optimizer.state[p] for p in parameters]
    gather = KernelGather(parameters, states)
    gather.run()
    for p, state in zip(parameters, states, strict=True):
        assert torch.equal(state["reference_value"], p.detach().flatten()[state["reference_index"]])
    assert gather.fits(parameters, states)
    states[0]["reference_value"] = states[0]["reference_value"].clone()
    assert not gather.fits(parameters, states)


@pytest.mark.parametrize("network", starts.NETWORKS, **starts.by_name)
def test_remembered_entries_tell_as_much_as_all(network):
    """Whatever factors units were rescaled by, all weights are as they were when that is undone."""
    model, _ = starts.build(network)
    graph = starts.traced(network)
    upkeep = BalancedMuon(model, graph)._upkeep
    before = [p.detach().clone() for p in model.parameters()]
    starts.rescale(model, graph, "log-normal", 3 if network is starts.Squares else 10)
    assert upkeep._undo_rescaling()
    for p, q in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=0)


def test_places_of_classes():
    classes, held = torch.tensor([2, 0, 1, 2, 3, 2, 1]), torch.tensor([True, False, False, False, False])
    leads_in = torch.arange(7) != 5
    free = Relations(5, join_terms([]))
    grows, shrinks = list_places(free, classes, leads_in, held)
    assert grows.tolist() == [[7, 7], [2, 6], [0, 3], [4, 7], [7, 7]]
    assert shrinks.tolist() == [[7], [7], [5], [7], [7]]
    assert [x.tolist() for x in list_places(free, classes, leads_in, torch.ones(5) > 0)] == [[[7]] * 5] * 2


def test_places_of_classes_that_follow():
    """x_2 = -x_1, x_3 = 2 x_1 + x_4."""
    terms = Terms(torch.tensor([2, 3, 3]), torch.tensor([1, 1, 4]), torch.tensor([-1, 2, 1]))
    classes, leads_in = torch.tensor([1, 2, 2, 3, 4]), torch.tensor([True, True, False, False, True])
    grows, shrinks = list_places(Relations(5, terms), classes, leads_in, torch.arange(5) == 0)
    assert grows.tolist() == [[5, 5], [0, 2], [5, 5], [5, 5], [4, 5]]
    assert shrinks.tolist() == [[5, 5, 5], [1, 3, 3], [5, 5, 5], [5, 5, 5], [3, 5, 5]]
