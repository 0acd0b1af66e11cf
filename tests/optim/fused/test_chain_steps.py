"""The fused implementations against the reference: the same steps, and when carried gammas are dropped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import PathSGD, clip_path_grad_norm_
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.graph.chains import chains
from pathsgd.optim import measurement
from pathsgd.optim.fused.blocked import Blocked
from pathsgd.optim.fused.gpu import triton_chain as gpu_chain
from pathsgd.optim.fused.gpu import triton_kernels as gpu_code
from pathsgd.optim.fused.gpu.triton_layout import layout_of
from support.networks import NETWORKS
from support.networks import build as build_network
from support.stacks import KINDS, assert_close, is_fused, rescaled, stack, train


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"maximize": True, "weight_decay": 0.1},
        {"p": 1.0},
        {"p": 4, "momentum": 0.5},
        {"lr": torch.tensor(2e-3)},
    ],
    ids=str,
)
def test_every_kernel_takes_the_steps_of_the_reference(kind, options):
    model = stack(7, 20, 33, 5)
    options = {"lr": 1e-4 if options.get("p") == 4 else 1e-3, **options}
    expected, _ = train(copy.deepcopy(model), implementation="reference", **options)
    found, optimizer = train(model, implementation=kind, **options)
    assert is_fused(optimizer)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "widths", [(5, 8, 3), (4, 150, 140, 6), (3, 9, 8, 7, 4), (6, 5, 4, 5, 6, 7, 8, 3), (1, 1, 1)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_chains_of_any_depth(kind, widths, bias):
    model = stack(*widths, bias=bias)
    expected, _ = train(copy.deepcopy(model), implementation="reference", momentum=0.9, lr=1e-3)
    found, optimizer = train(model, implementation=kind, momentum=0.9, lr=1e-3)
    assert is_fused(optimizer)
    assert_close(found, expected)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_layer_divided_among_many_processors(rounds, monkeypatch):
    """Its sums come in more parts than are loaded at once; here four, so that it does not take so many."""
    for module in (gpu_code, gpu_chain):
        monkeypatch.setattr(module, "OUT_AT_ONCE", type(gpu_code.OUT_AT_ONCE)(4))
    monkeypatch.setattr(gpu_chain, "_processors", lambda device: 2 * rounds)
    model = stack(6, 9, 8, 16 * 4 * rounds)
    expected, _ = train(copy.deepcopy(model), implementation="reference", momentum=0.9, lr=1e-3, steps=3)
    found, optimizer = train(model, implementation="triton", momentum=0.9, lr=1e-3, steps=3)
    assert is_fused(optimizer)
    (chain,) = chains(optimizer.graph)
    assert max(vector.parts for vector in layout_of(chain, 2 * rounds).out) == 4 * rounds
    assert_close(found, expected)


@pytest.mark.parametrize("kind", ["blocked"])
def test_a_hundred_steps(kind):
    model = stack(20, 64, 64, 10)
    expected, _ = train(copy.deepcopy(model), steps=100, implementation="reference", lr=1e-3)
    found, _ = train(model, steps=100, implementation=kind, lr=1e-3)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rescaled_copies_give_the_same_bits(kind):
    model = stack(7, 20, 33, 5)
    other = rescaled(model)
    for m in (model, other):
        train(m, implementation=kind, momentum=0.9, weight_decay=0.1)
    x = torch.randn(3, 7)
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_carried_is_what_would_be_measured(kind, monkeypatch):
    """The kernel measures once, at the first step; afterwards gamma falls out of the update."""
    measured = []
    real = measurement.measure_gammas
    monkeypatch.setattr(measurement, "measure_gammas", lambda *a, **k: measured.append(1) or real(*a, **k))
    model, optimizer = train(stack(6, 12, 11, 10, 4), steps=6, implementation=kind)
    assert len(measured) == 2  # once when it was made, once at the first step
    expected, _ = train(copy.deepcopy(model), steps=1, implementation="reference")
    torch.manual_seed(0)
    x, y = torch.randn(20, 6), torch.randint(4, (20,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert len(measured) == 4  # the reference's own two
    assert_close(model, expected, rtol=1e-7)


WRITES = {
    "in place": lambda w: w.mul_(2),
    "moved": lambda w: setattr(w, "data", w.data * 2),
}
HIDDEN_WRITES = {
    "data": lambda w: w.data.mul_(2),
    "numpy": lambda w: w.detach().numpy().__imul__(2),
}
"""torch does not count these: the user calls refresh()."""


@pytest.mark.parametrize("write", [*WRITES, *HIDDEN_WRITES])
def test_weights_written_between_steps(write):
    def between(k, model, optimizer):
        if k == 3:
            with torch.no_grad():
                {**WRITES, **HIDDEN_WRITES}[write](model[2].weight)
            if write in HIDDEN_WRITES:
                optimizer.refresh()

    model = stack(7, 20, 33, 5)
    expected, _ = train(copy.deepcopy(model), implementation="reference", between=between)
    found, _ = train(model, implementation="blocked", between=between)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_beyond_plain_floats_the_reference_takes_over(kind):
    def between(k, model, _):
        if k == 2:
            with torch.no_grad():
                model[0].weight.mul_(1e-15), model[0].bias.mul_(1e-15), model[2].weight.mul_(1e15)

    model = stack(7, 20, 33, 5)
    expected, _ = train(copy.deepcopy(model), implementation="reference", between=between)
    found, optimizer = train(model, implementation=kind, between=between)
    assert not is_fused(optimizer)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_unit_stays_dead(kind):
    model = stack(5, 8, 6, 3)
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2] = 0, 0
        model[4].weight[:, 1] = 0
    expected, _ = train(copy.deepcopy(model), implementation="reference")
    found, optimizer = train(model, implementation=kind)
    assert is_fused(optimizer)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", ["blocked", "triton"])
def test_low_precision_is_computed_in_fp32(kind):
    model = stack(6, 16, 12, 4, dtype=torch.float16)
    expected, _ = train(copy.deepcopy(model), implementation="reference", steps=3)
    found, optimizer = train(model, implementation=kind, steps=3)
    assert is_fused(optimizer)
    assert all(p.dtype == torch.float16 for p in found.parameters())
    assert_close(found.float(), expected.float(), rtol=2e-3)


def test_double_precision_has_its_kernel_too():
    model = stack(6, 16, 12, 4, dtype=torch.float64)
    expected, _ = train(copy.deepcopy(model), implementation="reference")
    found, optimizer = train(model)
    assert is_fused(optimizer)
    assert_close(found, expected, rtol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_memory_layouts(kind):
    """A transposed weight, and gradients that lie otherwise than their weights."""
    model = stack(7, 20, 33, 5)
    model[2].weight.data = model[2].weight.data.t().contiguous().t()

    def between(k, model, _):
        if k % 2:
            model[0].weight.grad = model[0].weight.grad.t().contiguous().t()

    expected, _ = train(copy.deepcopy(model), implementation="reference", between=between)
    found, _ = train(model, implementation=kind, between=between, momentum=0.0)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_and_missing_gradients(kind):
    def between(k, model, optimizer):
        clip_path_grad_norm_(optimizer, 0.1)
        if k == 2:
            model[2].weight.grad = None

    model = stack(7, 20, 33, 5)
    expected, _ = train(copy.deepcopy(model), implementation="reference", between=between, momentum=0.9)
    found, _ = train(model, implementation=kind, between=between, momentum=0.9)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_state_moves_between_kernels_and_the_reference(kind):
    model = stack(7, 20, 33, 5)
    expected, _ = train(copy.deepcopy(model), steps=6, momentum=0.9, implementation="reference")
    model, first = train(model, steps=3, momentum=0.9, implementation=kind)
    second = PathSGD(model, implementation="reference")
    second.load_state_dict(first.state_dict())
    third = PathSGD(model, implementation=kind)
    torch.manual_seed(0)
    x, y = torch.randn(20, 7), torch.randint(5, (20,))
    for optimizer in (second, third, copy.deepcopy(third)):
        if optimizer is third:
            third.load_state_dict(second.state_dict())
        optimizer = third if optimizer is not second else second
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_close(model, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_differ_in_lr_and_decay(kind):
    """No decay on biases, as is usual, and a rate of its own for the last layer."""
    start = stack(7, 20, 33, 5)
    ends = []
    for implementation in ("reference", kind):
        model = copy.deepcopy(start)
        named = dict(model.named_parameters())
        last = [named.pop("4.weight")]
        groups = [
            {"params": [p for n, p in named.items() if n.endswith("weight")], "weight_decay": 0.5},
            {"params": [p for n, p in named.items() if n.endswith("bias")], "lr": 3e-3},
            {"params": last, "lr": 1e-4},
        ]
        optimizer = PathSGD(
            groups, graph=pathsgd.trace(model), lr=1e-3, momentum=0.9, implementation=implementation
        )
        torch.manual_seed(0)
        x, y = torch.randn(20, 7), torch.randint(5, (20,))
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append(model)
        assert is_fused(optimizer) == (implementation == kind)
    assert_close(ends[1], ends[0])
    other = copy.deepcopy(start)
    weights = [p for p in other.parameters() if p.dim() == 2]
    biases = [p for p in other.parameters() if p.dim() == 1]
    optimizer = PathSGD(
        [{"params": weights, "momentum": 0.9}, {"params": biases}],
        graph=pathsgd.trace(other),
        implementation=kind,
    )
    nn.functional.cross_entropy(other(x), y).backward()
    optimizer.step()
    assert not optimizer._dispatch._chain_steps  # rules that do not go together


@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_a_chain(network):
    model, x = build_network(network)
    assert bool(chains(pathsgd.trace(model, x))) == (network.__name__ == "Mlp")


def test_two_chains_and_what_is_none():
    model = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)
    )
    graph = pathsgd.trace(model)
    assert [[layer.weight for layer in chain] for chain in chains(graph)] == [
        ["0.weight", "2.weight"], ["4.weight", "6.weight"],
    ]  # fmt: skip
    shared = nn.Linear(4, 4)
    for other in (
        nn.Sequential(shared, nn.ReLU(), shared),
        nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
        nn.Linear(4, 3),
    ):
        assert chains(pathsgd.trace(other, torch.zeros(2, 4))) == []
    tokens = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    assert chains(pathsgd.trace(tokens, torch.zeros(2, 7, 4))) == []  # seven positions


def test_unknown_implementations_are_refused():
    with pytest.raises(ValueError, match="Invalid implementation: 'fast'"):
        PathSGD(stack(5, 8, 3), implementation="fast")


def tensors_in(thing, found=None):
    """Every tensor that an object keeps in its attributes, lists and dicts, each once."""
    found = {} if found is None else found
    if isinstance(thing, torch.Tensor):
        found[id(thing)] = thing
    elif isinstance(thing, (list, tuple, dict)):
        for item in thing.values() if isinstance(thing, dict) else thing:
            tensors_in(item, found)
    elif hasattr(thing, "__dict__"):
        tensors_in(vars(thing), found)
    return list(found.values())


def test_memory_beyond_sgd_is_a_few_vectors(monkeypatch):
    made = []
    real = Blocked.start
    monkeypatch.setattr(Blocked, "start", lambda self, *args: made.append(self) or real(self, *args))
    _, optimizer = train(stack(300, 400, 500, 10), steps=2, implementation="blocked")
    (blocked,) = made
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(blocked)}
    assert 0 < sum(storages.values()) <= 4 * 8 * (300 + 400 + 500 + 10)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("kind", "factor", "exponents"), [*((kind, 0.3, True) for kind in KINDS), ("blocked", 5, False)]
)
def test_a_chain_too_deep_for_floats_is_carried_in_a_frame(kind, factor, exponents, monkeypatch):
    """Twenty layers: path weights of 2^-100, those of any one layer close together; or of 2^60, which plain
    floats are enough for if they are measured, not if they are carried."""
    model = stack(*[8] * 20, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    graph = pathsgd.trace(model)
    found = measure_gammas(graph, graph.tensors(model), 2)
    assert found.exponents == exponents
    sizes = [5 * found[name].dense() * p.detach() for name, p in model.named_parameters()]
    measured = []
    real = measurement.measure_gammas
    monkeypatch.setattr(measurement, "measure_gammas", lambda *a, **k: measured.append(1) or real(*a, **k))
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [
        PathSGD(m, graph, lr=1e-3, momentum=0.9, weight_decay=0.1, implementation=i)
        for m, i in ((model, kind), (other, "reference"))
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p, q, size in zip(model.parameters(), other.parameters(), sizes, strict=True):
            p.grad = size * torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert is_fused(optimizers[0])
    assert len(measured) == 2 + 1 + 3  # when they were made; at the first step; by the reference
    assert_close(model, other)
    for p, q in zip(model.parameters(), start.parameters(), strict=True):
        assert (p - q).norm() > 1e-3 * q.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_gammas_too_far_apart_for_one_frame_are_left_to_the_reference(kind):
    model = stack(4, 6, 5, 3)
    pathsgd.rescale(model, None, {("0", n): 2.0 ** (12 * n) for n in range(6)})
    expected, _ = train(copy.deepcopy(model), implementation="reference", lr=1e-3)
    found, optimizer = train(model, implementation=kind, lr=1e-3)
    assert not is_fused(optimizer)
    assert_close(found, expected)
