"""A network and its rescaled copy take the same steps, under every path optimizer; under torch's not."""

from __future__ import annotations

import copy

import pytest
import torch

import pathsgd
from networks import Mlp, Recurrent, SmallResNet, Transformer, Vgg, build
from pathsgd import PathAdagrad, PathAdam, PathNormalized, PathSGD
from pathsgd.geometry.rescale import apply_scales
from pathsgd.graph.units import units_of

NETS = [Mlp, Vgg, SmallResNet, Recurrent, Transformer]
STEPS = 50

# Any p, and decay and momentum of every kind.
OPTIMIZERS = {
    "p=1": lambda m, g: PathSGD(m, g, lr=1e-6, p=1),
    "p=1.5": lambda m, g: PathSGD(m, g, lr=1e-5, p=1.5),
    "p=2": lambda m, g: PathSGD(m, g, lr=1e-4),
    "p=4": lambda m, g: PathSGD(m, g, lr=1e-5, p=4),
    "momentum": lambda m, g: PathSGD(m, g, lr=1e-5, momentum=0.9),
    "nesterov": lambda m, g: PathSGD(m, g, lr=1e-5, momentum=0.9, nesterov=True, foreach=True),
    "decay": lambda m, g: PathSGD(m, g, lr=1e-4, momentum=0.5, weight_decay=0.1),
    "Adagrad": lambda m, g: PathAdagrad(m, g, lr=1e-3),
    "Adam": lambda m, g: PathAdam(m, g, lr=1e-4),
    "AdamW": lambda m, g: PathNormalized(torch.optim.AdamW, m, g, lr=1e-4, weight_decay=0.1),
    "RMSprop": lambda m, g: PathNormalized(torch.optim.RMSprop, m, g, lr=1e-5, momentum=0.5),
    "clipped": lambda m, g: clipped(PathSGD(m, g, lr=1e-3, momentum=0.9)),
    "limited": lambda m, g: PathSGD(m, g, lr=1e-2, momentum=0.5, max_relative_step=1e-3),
    "gram": lambda m, g: PathSGD(m, g, lr=1e-4, shared="gram"),
    "coupled": lambda m, g: PathNormalized(torch.optim.SGD, m, g, lr=1e-4, momentum=0.9, weight_decay=0.1),
}


def clipped(optimizer, max_norm=0.01):
    """Clips before every step, by the invariant norm."""

    def clip(*_):
        pathsgd.clip_path_grad_norm_(optimizer, max_norm)

    optimizer.register_step_pre_hook(clip)
    return optimizer


# Only products and square roots: exact under powers of two.
EXACT = [name for name in OPTIMIZERS if name != "p=1.5"]


def pair(network, dtype, powers_of_two):
    """(model, rescaled copy, graph, input): every unit scaled by 1e-3 to 1e3, or by 2^-10 to 2^10."""
    model, x = build(network, dtype)
    graph = pathsgd.trace(model, x)
    units = units_of(graph)
    generator = torch.Generator().manual_seed(1)
    count = units.count
    if powers_of_two:
        factors = torch.exp2(torch.randint(-10, 11, (count,), generator=generator).double())
    else:
        factors = 10 ** (6 * torch.rand(count, generator=generator, dtype=torch.float64) - 3)
    copied = copy.deepcopy(model)
    apply_scales(graph, graph.tensors(copied), units, factors)
    return model, copied, graph, x


def train(model, optimizer, x, steps=STEPS):
    targets = torch.arange(len(x)) % 2
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(1), targets)
        loss.backward()
        optimizer.step()
    return model(x).detach()


def pairs(names):
    """Every optimizer with every network; what concerns repeated weights with the one that has them."""
    return [(net, name) for name in names for net in NETS if name != "gram" or net is Recurrent]


@pytest.mark.parametrize(("network", "name"), pairs(OPTIMIZERS))
def test_a_rescaled_copy_takes_the_same_steps(network, name):
    model, copied, graph, x = pair(network, torch.float64, powers_of_two=False)
    start = model(x).detach()
    ends = [train(m, OPTIMIZERS[name](m, graph), x) for m in (model, copied)]
    movement = (ends[0] - start).norm()
    assert movement > 1e-9 * start.norm()
    assert (ends[0] - ends[1]).norm() <= 1e-9 * movement


@pytest.mark.parametrize(("network", "name"), pairs(EXACT))
def test_powers_of_two_give_the_same_bits(network, name):
    model, copied, graph, x = pair(network, torch.float32, powers_of_two=True)
    ends = [train(m, OPTIMIZERS[name](m, graph), x) for m in (model, copied)]
    assert torch.isfinite(ends[0]).all()
    assert torch.equal(*ends)


@pytest.mark.parametrize("network", NETS)
@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, 1e-4),
        lambda ps: torch.optim.SGD(ps, 1e-4, momentum=0.9),
        lambda ps: torch.optim.Adagrad(ps, 1e-3),
        lambda ps: torch.optim.Adam(ps, 1e-3),
    ],
    ids=["SGD", "momentum", "Adagrad", "Adam"],
)
def test_torch_optimizers_do_not(network, make):
    """So that the tests above can fail."""
    model, copied, _, x = pair(network, torch.float64, powers_of_two=False)
    start = model(x).detach()
    ends = [train(m, make(list(m.parameters())), x, steps=5) for m in (model, copied)]
    assert not (ends[0] - ends[1]).norm() <= 1e-3 * (ends[0] - start).norm()
