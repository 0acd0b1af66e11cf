"""A network and its rescaled copy take the same steps, under every path optimizer; under torch's not."""

from __future__ import annotations

import pytest
import torch

from support.networks import Mlp, Recurrent, SmallResNet, Transformer, Vgg
from support.training import OPTIMIZERS, pair, train

pytestmark = pytest.mark.filterwarnings("ignore:.*share a path with the matrix:UserWarning")
"""Paths of a step end at batch norms, so of a ResNet's few are left, and a warning says so."""

NETS = [Mlp, Vgg, SmallResNet, Recurrent, Transformer]


# Only products and square roots: exact under powers of two.
EXACT = [name for name in OPTIMIZERS if name != "p=1.5"]


@pytest.mark.parametrize("network", NETS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rescaled_copy_takes_the_same_steps(network, name):
    model, copied, graph, x = pair(network, torch.float64, powers_of_two=False)
    start = model(x).detach()
    ends = [train(m, OPTIMIZERS[name](m, graph), x) for m in (model, copied)]
    movement = (ends[0] - start).norm()
    assert movement > 1e-9 * start.norm()
    assert (ends[0] - ends[1]).norm() <= 1e-9 * movement


@pytest.mark.parametrize("network", NETS)
@pytest.mark.parametrize("name", EXACT)
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
