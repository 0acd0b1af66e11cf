"""The spectral norm of a step, from one power iteration a step."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from pathsgd.optim.relative.spectral import KEY, find_spectral_norms
from torch import nn
from torch.nn import functional as F

from pathsgd import PathAdam, PathNormalized

SHAPES = [(8, 30), (50, 20), (1, 6), (16, 1)]


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_the_first_call_is_near_and_later_ones_follow_a_matrix_that_changes():
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = make_optimizer(parameters)
    average = [torch.zeros(shape) for shape in SHAPES]
    for step in range(60):
        for matrix in average:  # as Adam's does
            matrix.lerp_(torch.randn(matrix.shape, generator=generator), 1.0 if step == 0 else 0.1)
        found = find_spectral_norms(optimizer, parameters, [1] * len(SHAPES), average)
        exact = torch.stack([torch.linalg.matrix_norm(matrix, 2) for matrix in average])
        assert (found <= exact * 1.0001).all()
        assert (found >= 0.75 * exact).all(), step


def test_every_block_of_a_parameter_has_its_own():
    parameter = nn.Parameter(torch.zeros(6, 4))
    optimizer = make_optimizer([parameter])
    blocks = [torch.randn(2, 4, generator=torch.Generator().manual_seed(k)) * 10**k for k in range(3)]
    found = find_spectral_norms(optimizer, [parameter], [3], blocks)
    exact = [torch.linalg.matrix_norm(block, 2).item() for block in blocks]
    assert found.tolist() == pytest.approx(exact, rel=1e-2)
    assert optimizer.state[parameter][KEY].shape == (12,)


def test_a_step_of_zero_has_norm_zero_and_the_vector_stays():
    parameter = nn.Parameter(torch.zeros(5, 4))
    optimizer = make_optimizer([parameter])
    matrix = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    find_spectral_norms(optimizer, [parameter], [1], [matrix])
    kept = optimizer.state[parameter][KEY].clone()
    assert find_spectral_norms(optimizer, [parameter], [1], [torch.zeros(5, 4)]).tolist() == [0]
    assert torch.equal(optimizer.state[parameter][KEY], kept)


def nadam(model, x, **options):
    return PathNormalized(
        torch.optim.NAdam, model, x, relative=True, decoupled_weight_decay=True, eps=1e-12, **options
    )


@pytest.mark.parametrize("inputs", ["noise", "all alike"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("make", [PathAdam, nadam])
def test_a_step_has_lr_times_the_norm_of_an_orthogonal_matrix(inputs, decay, make):
    """Whether its entries move together or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30, bias=False), nn.LayerNorm(30), nn.Linear(30, 5)).double()
    x = torch.randn(64, 40, dtype=torch.float64)
    x = x[:1] + 0.01 * x if inputs == "all alike" else x
    optimizer = make(model, x, lr=1e-3, growth=0.0, weight_decay=decay)
    weight = model[0].weight
    before = weight.detach().clone()
    F.cross_entropy(model(x), torch.randint(5, (64,))).backward()
    optimizer.step()
    size = before.norm() / math.sqrt(before.numel())
    step = (weight.detach() * before.norm() / weight.norm() - before) / size
    norm = torch.linalg.matrix_norm(step, 2).item()
    assert norm == pytest.approx(1e-3 * math.sqrt(40), rel=0.03)


def train(model, x, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vectors_are_loaded_as_they_were_saved(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).to(dtype)
    x = torch.randn(8, 6).to(dtype)
    optimizer = PathAdam(model, x)
    train(model, x, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    loaded, wider = copy.deepcopy(model), copy.deepcopy(model).double()
    other = PathAdam(loaded, x)
    other.load_state_dict(copy.deepcopy(state))
    assert torch.equal(other.state[loaded[0].weight][KEY], optimizer.state[model[0].weight][KEY])
    train(model, x, optimizer)
    train(loaded, x, other)
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    cast = PathAdam(wider, x.double())
    cast.load_state_dict(state)
    train(wider, x.double(), cast)
