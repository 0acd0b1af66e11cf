"""torch's optimizers by fused implementations, against torch's own step on z."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

import pathsgd
from pathsgd import PathNormalized
from pathsgd.graph.chains import chains
from pathsgd.optim.fused.blocked import Part, take_scratch, update_
from pathsgd.optim.fused.exponent_frame import ExponentFrame
from pathsgd.optim.fused.gpu.triton_chain import TritonChain
from pathsgd.optim.fused.implementation import LayerTensors
from pathsgd.optim.rule import Rule
from support.calls import Calls
from support.stacks import KINDS, assert_close, is_fused, rescaled, stack, traced

OPTIMIZERS = {
    "SGD": (SGD, {"lr": 1e-3}),
    "SGD, decay": (SGD, {"lr": 1e-3, "weight_decay": 0.1}),
    "momentum, decay": (SGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}),
    "Nesterov": (SGD, {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adagrad": (Adagrad, {"lr": 1e-2}),
    "Adagrad, decays": (
        Adagrad,
        {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
    "Adam": (Adam, {"lr": 1e-3}),
    "Adam, decay": (Adam, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}),
    "AdamW": (AdamW, {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "Adam, p = 1": (Adam, {"lr": 1e-3, "p": 1}),
    "Adagrad, p = 4": (Adagrad, {"lr": 1e-3, "p": 4}),
}


def train(model, name, steps=3, optimizer=None, between=None, **options):
    """The model after some steps of an optimizer of the list, and that optimizer."""
    torch.manual_seed(0)
    kind, own = OPTIMIZERS[name]
    optimizer = optimizer or PathNormalized(kind, model, traced(model), **{**own, **options})
    parameter = next(model.parameters())
    x = torch.randn(20, model[0].in_features, dtype=torch.float64).to(parameter.dtype)
    y = torch.randint(model[-1].out_features, (20,))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        if between is not None:
            between(model)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_steps_are_those_of_torch_on_z(kind, name):
    model = stack(7, 20, 33, 5)
    expected, reference = train(copy.deepcopy(model), name, implementation="reference")
    found, optimizer = train(model, name, implementation=kind)
    assert is_fused(optimizer)
    assert_close(found, expected)
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        ours, theirs = optimizer.state[p], reference.state[q]
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            assert (ours[key].shape, ours[key].dtype) == (value.shape, value.dtype)
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_double_precision_they_agree_to_rounding(name):
    model = stack(7, 20, 33, 5, dtype=torch.float64)
    expected, _ = train(copy.deepcopy(model), name, implementation="reference", steps=10)
    found, optimizer = train(model, name, implementation="blocked", steps=10)
    assert is_fused(optimizer)
    assert_close(found, expected, rtol=1e-13)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_large_chain_in_blocks_of_rows(name, monkeypatch):
    model = stack(7, 20, 33, 5, dtype=torch.float64)
    expected, _ = train(copy.deepcopy(model), name, implementation="reference", steps=10)
    monkeypatch.setattr("pathsgd.optim.fused.blocked.BLOCK", 100)  # five rows of the widest layer
    found, optimizer = train(model, name, implementation="blocked", steps=10)
    assert is_fused(optimizer)
    assert_close(found, expected, rtol=1e-13)


@pytest.mark.parametrize("block", [100, 1 << 21])
def test_groups_with_rules_of_their_own(block, monkeypatch):
    """Biases without decay, and one layer at another rate."""
    monkeypatch.setattr("pathsgd.optim.fused.blocked.BLOCK", block)

    model = stack(7, 20, 33, 5, dtype=torch.float64)
    expected = copy.deepcopy(model)
    for own, kind in ((model, "blocked"), (expected, "reference")):
        weights, biases = ([p for p in own.parameters() if p.dim() == n] for n in (2, 1))
        groups = [
            {"params": weights[1:]},
            {"params": weights[:1], "lr": 1e-2},
            {"params": biases, "weight_decay": 0.0},
        ]
        optimizer = PathNormalized(
            AdamW, groups, pathsgd.trace(own), lr=1e-3, weight_decay=0.5, implementation=kind
        )
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for p in own.parameters():
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            optimizer.step()
        assert is_fused(optimizer) == (kind == "blocked")
    assert_close(model, expected, rtol=1e-13)


def test_a_small_chain_moves_by_few_calls():
    """Each costs as much as the work on some thousands of numbers."""
    for name, most in {"SGD": 20, "AdamW": 40}.items():
        _, optimizer = train(stack(7, 20, 33, 5), name, implementation="blocked")
        with Calls() as calls:
            optimizer.step()
        assert 0 < calls.count <= most


@pytest.mark.parametrize("kind", ["blocked"])
@pytest.mark.parametrize("name", ["momentum, decay", "Adagrad, decays", "AdamW"])
def test_a_hundred_steps(kind, name):
    """With gradients that are given: a network's own would amplify the rounding of its forward pass."""
    model = stack(20, 64, 64, 10)

    def train(model, steps=100, **options):
        generator = torch.Generator().manual_seed(0)
        optimizer = PathNormalized(
            OPTIMIZERS[name][0], model, traced(model), **OPTIMIZERS[name][1], **options
        )
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * 1e-2
            optimizer.step()
        return model

    start = copy.deepcopy(model)
    expected = train(copy.deepcopy(model), implementation="reference")
    assert_close(train(model, implementation=kind), expected)
    assert not torch.allclose(model[2].weight, start[2].weight, rtol=0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["momentum, decay", "Adagrad, decays", "Adam, decay", "AdamW"])
def test_rescaled_copies_give_the_same_bits(kind, name):
    model = stack(7, 20, 33, 5)
    other = rescaled(model)
    for m in (model, other):
        train(m, name, implementation=kind)
    x = torch.randn(3, 7)
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["SGD, decay", "momentum, decay", "Adam, decay", "AdamW"])
def test_dead_units_stay_where_they_are(kind, name):
    """z of a weight on no path is zero whatever the weight is: nothing moves it."""
    model = stack(4, 6, 5, 3)

    def cut(model):
        """Nothing leaves unit 1 of the first layer, and nothing is going to."""
        model[2].weight.grad[:, 1] = 0

    with torch.no_grad():
        model[2].weight[:, 1] = 0
    before = model[0].weight[1].clone()
    expected, _ = train(copy.deepcopy(model), name, implementation="reference", between=cut)
    train(model, name, implementation=kind, between=cut)
    assert torch.equal(model[0].weight[1], before)
    assert_close(model, expected)


@pytest.mark.parametrize("name", ["momentum, decay", "Adagrad, decays", "AdamW"])
def test_a_run_may_change_its_implementation(name):
    model = stack(5, 8, 7, 3)
    expected, _ = train(copy.deepcopy(model), name, steps=9, implementation="reference")
    saved = None
    for kind in ("blocked", "reference", "triton"):
        optimizer = PathNormalized(OPTIMIZERS[name][0], model, implementation=kind, **OPTIMIZERS[name][1])
        if saved is not None:
            optimizer.load_state_dict(saved)
        train(model, name, steps=3, optimizer=optimizer)
        saved = optimizer.state_dict()
    assert_close(model, expected)


def test_a_step_counted_on_the_device():
    """As Adam does when it is capturable; lr there too."""
    torch.manual_seed(0)
    model = stack(4, 6, 3)
    (chain,) = chains(pathsgd.trace(model))
    kernels = TritonChain(chain, 2, torch.device("cpu"))
    plain = ExponentFrame((0, 0), (0, 0), 2)
    kernels.start([torch.full((4,), 2.0), torch.ones(6)], [torch.full((6,), 0.5), torch.ones(3)], plain)
    step = torch.tensor(3.0)
    numbers = {"method": "adam", "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decay": "live"}
    rule = Rule(lr=torch.tensor(1e-2), step=step, **numbers)
    weight, grad = model[0].weight.detach(), torch.randn(6, 4)
    state = (torch.randn(6, 4), torch.rand(6, 4))
    known = Rule(lr=1e-2, step=3.0, **numbers)
    wanted, wanted_state = weight.clone(), tuple(s.clone() for s in state)
    (scratch,) = take_scratch([wanted], torch.float32)
    update_([Part(wanted, grad, wanted_state, torch.ones(6, 4), scratch)], known)
    kernels.update(0, LayerTensors(rule, rule, weight, grad, state), into=True, out=False)
    torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state, wanted_state, rtol=1e-6, atol=1e-7)


def test_what_is_in_no_chain_moves_in_the_same_step():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.image = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))
            self.flat = nn.Sequential(nn.Linear(25, 6), nn.ReLU(), nn.Linear(6, 2))

        def forward(self, x):
            return self.image(x).sum((2, 3)), self.flat(x.flatten(1))

    torch.manual_seed(0)
    model = Two()
    other = copy.deepcopy(model)
    x = torch.randn(4, 1, 5, 5)
    for m, kind in ((model, "auto"), (other, "reference")):
        optimizer = PathNormalized(AdamW, m, x, lr=1e-3, implementation=kind)
        for _ in range(4):
            optimizer.zero_grad()
            sum(y.square().sum() for y in m(x)).backward()
            optimizer.step()
            assert all(p.grad is not None for p in m.parameters())
    assert_close(model, other)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"momentum": 0.9, "dampening": 0.1}),
        (Adam, {"amsgrad": True}),
        (torch.optim.RMSprop, {}),
        (type("Mine", (AdamW,), {}), {}),
        (AdamW, {"max_relative_step": 0.1}),
    ],
)
def test_what_has_no_fused_rule_goes_by_the_reference(kind, options):
    model = stack(5, 8, 3)
    optimizer = PathNormalized(kind, model, lr=1e-3, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    assert set(optimizer.implementations.values()) == {"reference"}


def test_no_copies_of_the_parameters_are_kept():
    """Between steps there is torch's own state; the vectors of gamma are tested with PathSGD."""
    model = stack(300, 400, 500, 10)
    _, optimizer = train(model, "AdamW", steps=2)
    state = [t for p in model.parameters() for t in optimizer.state[p].values() if t.dim()]
    assert sum(t.numel() for t in state) == 2 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_not_that_of_the_kernels(dtype):
    model = stack(5, 300, 8, 3)
    expected, _ = train(copy.deepcopy(model), "SGD", implementation="reference")
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        found, optimizer = train(model, "SGD", implementation="blocked")
    finally:
        torch.set_default_dtype(before)
    assert is_fused(optimizer)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_chains_of_two_precisions_in_one_model(kind):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = stack(5, 8, 3), stack(5, 8, 3, dtype=torch.float64)

        def forward(self, x):
            return self.narrow(x), self.wide(x.double())

    model = Two()
    other = copy.deepcopy(model)
    x = torch.randn(4, 5)
    for m, implementation in ((model, kind), (other, "reference")):
        optimizer = PathNormalized(SGD, m, x, lr=1e-3, momentum=0.9, implementation=implementation)
        for _ in range(4):
            optimizer.zero_grad()
            sum(y.square().sum().float() for y in m(x)).backward()
            optimizer.step()
    assert_close(model, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_gradient_with_strides(kind):
    model = stack(5, 8, 3)
    other = copy.deepcopy(model)
    for m, implementation in ((model, kind), (other, "reference")):
        optimizer = PathNormalized(Adam, m, lr=1e-3, implementation=implementation)
        for _ in range(3):
            torch.manual_seed(0)
            for p in m.parameters():
                p.grad = torch.randn(*p.shape, 2)[..., 0]
            optimizer.step()
    assert_close(model, other)


def test_sgd_without_momentum_keeps_no_state():
    _, optimizer = train(stack(5, 8, 3), "SGD")
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("widths", [(0, 4, 3), (4, 3, 0), (4, 0, 3)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_of_no_size_and_weights_beyond_floats(widths):
    model = stack(*widths)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e-25)
    optimizer = PathNormalized(Adam, model, torch.zeros(1, widths[0]), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()


# torch's fused kernel around which the reference is


def small_network(optimizer_class=AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    return model, PathNormalized(optimizer_class, model, torch.ones(1, 2, 6, 6), lr=1e-2, **options)


def step_once(model, optimizer, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 2, 6, 6)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam_on_a_cpu_takes_the_fused_kernel(monkeypatch, kind, relative):
    name = "_fused_adam_" if kind is Adam else "_fused_adamw_"
    kernel, taken = getattr(torch, name), []
    monkeypatch.setattr(torch, name, lambda *a, **b: taken.append(1) or kernel(*a, **b))
    found = []
    for foreach, count in ((None, 3), (False, 0)):
        taken.clear()
        model, optimizer = small_network(kind, relative=relative, foreach=foreach, implementation="reference")
        found.append(step_once(model, optimizer))
        assert len(taken) == count
        assert [group["fused"] for group in optimizer.param_groups] == [None]
    assert_all_close(*found)


def assert_all_close(found, expected):
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strided", ["gradient", "state"])
def test_the_fused_kernel_is_not_taken_where_it_would_be_wrong(strided):
    """It reads the memory of all tensors in the same order, whatever their strides."""
    found = []
    for foreach in (None, False):
        model, optimizer = small_network(relative=True, foreach=foreach)
        weight = model[3].weight
        if strided == "gradient":
            weight.register_post_accumulate_grad_hook(transpose_gradient)
        step_once(model, optimizer, 1)
        if strided == "state":
            state = optimizer.state[weight]
            state["exp_avg"] = state["exp_avg"].mT.contiguous().mT
        found.append(step_once(model, optimizer))
    assert_all_close(*found)


def transpose_gradient(parameter):
    parameter.grad = parameter.grad.mT.contiguous().mT


def test_what_adam_was_told_is_put_back_after_an_error(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    model, optimizer = small_network(relative=True)
    monkeypatch.setattr(torch, "_fused_adamw_", fail)
    with pytest.raises(ZeroDivisionError):
        step_once(model, optimizer, 1)
    assert [group["fused"] for group in optimizer.param_groups] == [None]
