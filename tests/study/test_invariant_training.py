"""Training on real data: scikit-learn's digits, from a balanced and from an unbalanced start."""

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import pathsgd
from pathsgd import PathNormalized, PathSGD

EPOCHS, BATCH = 20, 100


@pytest.fixture(scope="module")
def digits():
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float64)
    return x - x.mean(0), torch.tensor(labels)


def starts():
    """The paper's two: N(0, 1/fan_in) with zero biases, and the same after its random rescaling."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 10)
    ).double()
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.zeros_(layer.bias)
    unbalanced = copy.deepcopy(model)
    pathsgd.unbalance(unbalanced, generator=torch.Generator().manual_seed(0))
    return model, unbalanced


def curve(model, optimizer, digits):
    x, y = digits
    order = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x), generator=order).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model(x), y))
    return torch.stack(losses)


@pytest.mark.parametrize(
    "make",
    [lambda m: PathSGD(m, lr=0.1), lambda m: PathNormalized(torch.optim.Adagrad, m, lr=0.01)],
    ids=["PathSGD", "Adagrad"],
)
def test_both_starts_follow_one_curve(make, digits):
    curves = [curve(model, make(model), digits) for model in starts()]
    assert torch.allclose(*curves, rtol=0, atol=1e-8)
    assert curves[0][-1] < 0.1  # 2.3 at the start: it learns


@pytest.mark.parametrize(
    "make",
    [lambda m: torch.optim.SGD(m.parameters(), 0.1), lambda m: torch.optim.Adagrad(m.parameters(), 0.01)],
    ids=["SGD", "Adagrad"],
)
def test_torch_optimizers_do_not(make, digits):
    curves = [curve(model, make(model), digits) for model in starts()]
    assert not torch.allclose(*curves, rtol=0, atol=1e-2)
