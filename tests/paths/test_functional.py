"""Path-SGD for torch.func: the same steps as the optimizer, mapped, differentiated and compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

import pathsgd
from pathsgd import PathSGD
from pathsgd.functional import gammas, path_sgd
from support.networks import NETWORKS, Mlp, SmallResNet, Vgg, build, traced
from support.old_torch import MOST_GRAPHS
from support.training import pair, train

pytestmark = pytest.mark.filterwarnings("ignore:.*share a path with the matrix:UserWarning")
"""Paths of a step end at batch norms, so of a ResNet's few are left, and a warning says so."""


def loss_of(model):
    def loss(params, buffers, x):
        y = functional_call(model, (params, buffers), (x,)).flatten(1)
        return F.cross_entropy(y, torch.arange(len(x)) % 2)

    return loss


def tensors(model):
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return params, dict(model.named_buffers())


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "p": 1}])
def test_it_takes_the_steps_of_the_optimizer(network, options):
    model, x = build(network)
    graph = traced(network)
    (params, buffers), state = tensors(model), None
    before = {name: tensor.clone() for name, tensor in params.items()}
    for _ in range(3):
        grads = grad(loss_of(model))(params, buffers, x)
        params, state = path_sgd(graph, params, grads, state, buffers=buffers, lr=1e-4, **options)
    assert all(torch.equal(model.get_parameter(name), old) for name, old in before.items())
    train(model, PathSGD(model, graph, lr=1e-4, **options), x, steps=3)
    for name, parameter in model.named_parameters():
        assert torch.allclose(params[name], parameter, rtol=1e-12, atol=1e-15), name


@pytest.mark.parametrize("network", [Mlp, Vgg, SmallResNet])
def test_an_ensemble_of_rescaled_copies_moves_as_one(network):
    """vmap over a network and its equivalents: one call, the same function each after every step."""
    model, copied, graph, x = pair(network, torch.float64, powers_of_two=False)
    params, buffers = stack_module_state([model, copied])
    params = {name: tensor.detach() for name, tensor in params.items()}
    base = copy.deepcopy(model)

    def step(params, buffers):
        grads = grad(loss_of(base))(params, buffers, x)
        return path_sgd(graph, params, grads, buffers=buffers, lr=1e-4)[0]

    def outputs(params, buffers):
        return functional_call(base, (params, buffers), (x,))

    start = vmap(outputs)(params, buffers)[0]
    for _ in range(10):
        params = vmap(step)(params, buffers)
    ends = vmap(outputs)(params, buffers)
    movement = (ends[0] - start).norm()
    assert movement > 0
    assert (ends[0] - ends[1]).norm() <= 1e-9 * movement
    train(model, PathSGD(model, graph, lr=1e-4), x, steps=10)
    assert torch.allclose(model(x), ends[0])


def test_the_loss_after_a_step_is_differentiable_in_lr():
    model, x = build(Mlp)
    graph = traced(Mlp)
    params, buffers = tensors(model)
    loss = loss_of(model)

    def after(lr):
        moved, _ = path_sgd(graph, params, grad(loss)(params, buffers, x), lr=lr)
        return loss(moved, buffers, x)

    lr, eps = torch.tensor(1e-3, dtype=torch.float64), 1e-7
    slope = (after(lr + eps) - after(lr - eps)) / (2 * eps)
    assert torch.allclose(grad(after)(lr), slope, rtol=1e-6)
    rates = torch.tensor([0.0, 1e-4, 1e-3], dtype=torch.float64)
    assert torch.allclose(vmap(after)(rates), torch.stack([after(rate) for rate in rates]))


def test_transforms_nest():
    """The gradient of the loss after a step, for each member of an ensemble; statistics mapped alone."""
    model, x = build(Vgg)
    graph = traced(Vgg)
    loss = loss_of(model)
    params, buffers = stack_module_state([model, copy.deepcopy(model)])
    params = {name: tensor.detach() for name, tensor in params.items()}

    def after(params, buffers):
        moved, _ = path_sgd(graph, params, grad(loss)(params, buffers, x), buffers=buffers, lr=1e-4)
        return loss(moved, buffers, x)

    slopes = vmap(grad(after))(params, buffers)
    single = grad(after)(*tensors(model))
    assert all(torch.allclose(slopes[name][0], single[name]) for name in single)
    own, statistics = tensors(model)
    mapped = vmap(lambda b: gammas(graph, own, b)["0.weight"].dense())(buffers)
    assert torch.allclose(mapped[1], gammas(graph, own, statistics)["0.weight"].dense())


def test_dtypes_and_shapes_are_kept():
    model, x = build(Mlp, torch.bfloat16)
    graph = traced(Mlp, torch.bfloat16)
    params, _ = tensors(model)
    grads = {name: torch.ones_like(p) for name, p in params.items()}
    moved, _ = path_sgd(graph, params, grads, lr=torch.tensor([0.1]), weight_decay=0.1)
    assert all(moved[name].dtype == p.dtype and moved[name].shape == p.shape for name, p in params.items())
    with pytest.raises(pathsgd.PathError, match="the graph knows no parameter 'other'"):
        path_sgd(graph, {**params, "other": x}, {"other": x}, lr=0.1)


def test_it_compiles_to_one_graph():
    model, x = build(Mlp, torch.float32)
    graph = pathsgd.trace(model, x[:1])
    params, buffers = tensors(model)
    grads = grad(loss_of(model))(params, buffers, x)
    counter = CompileCounter()
    compiled = torch.compile(lambda *args: path_sgd(graph, *args, lr=1e-3)[0], backend=counter)
    for _ in range(2):
        found = compiled(params, grads)
    assert 0 < counter.frame_count <= MOST_GRAPHS
    expected, _ = path_sgd(graph, params, grads, lr=1e-3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_rules_of_your_own_are_invariant():
    """A sign step in invariant coordinates: z - lr sign(h)."""
    model, copied, graph, x = pair(Mlp, torch.float64, powers_of_two=False)
    ends = []
    for m in (model, copied):
        params, buffers = tensors(m)
        for _ in range(5):
            found = gammas(graph, params)
            grads = grad(loss_of(m))(params, buffers, x)
            params = {
                name: params[name] - found[name].step_from_z(1e-3 * found[name].gradient_to_z(g).sign())
                for name, g in grads.items()
            }
        ends.append(functional_call(m, params, (x,)))
    assert torch.allclose(*ends, rtol=1e-9)
    assert not torch.allclose(ends[0], model(x), rtol=1e-3)


def test_bad_input_is_named():
    model, x = build(SmallResNet)
    graph = traced(SmallResNet)
    params, buffers = tensors(model)
    with pytest.raises(pathsgd.PathError, match=r"buffer '.*running_var' is needed: pass buffers="):
        gammas(graph, params)
    with pytest.raises(pathsgd.PathError, match="a gradient for 'other' but no such parameter"):
        path_sgd(graph, params, {"other": x}, buffers=buffers, lr=0.1)
    name = next(iter(params))
    with pytest.raises(pathsgd.PathError, match="has shape"):
        path_sgd(graph, {**params, name: x}, {}, buffers=buffers, lr=0.1)
    del params[name]
    with pytest.raises(pathsgd.PathError, match="there is no parameter"):
        path_sgd(graph, params, {}, buffers=buffers, lr=0.1)
