"""Training on a GPU, for every method: against the CPU, and resumed runs against whole ones."""

import pytest
import torch

from study.config import Run
from study.data import Dataset
from study.methods import METHODS
from study.training import Trainer, prepare_data

pytestmark = pytest.mark.gpu

STEP_SIZES = {"sgd": 0.05, "momentum": 0.01, "path-sgd": 0.02, "path-momentum": 0.002}
"""At which each learns; the others are adaptive."""
ADAPTIVE = 1e-3
EPOCHS = 4


def make_run(name, dropout=0.0):
    return Run(
        dataset="clusters", method=name, step_size=STEP_SIZES.get(name, ADAPTIVE), hidden=(129, 257),
        dropout=dropout, batch=50, init="unbalanced" if METHODS[name].invariant else "balanced",
    )  # fmt: skip


@pytest.fixture(scope="module")
def data():
    """Ten clouds that overlap, on both devices."""
    random = torch.Generator().manual_seed(0)
    y = torch.randint(10, (3_000,), generator=random)
    centres = torch.randint(40, 216, (10, 100), generator=random)
    noise = 60 * torch.randn(len(y), 100, generator=random)
    x = (centres[y] + noise).clamp(0, 255).to(torch.uint8)
    clusters = Dataset("clusters", (100,), 10, x[:2_500], y[:2_500], x[2_500:], y[2_500:])
    return {name: prepare_data(clusters, make_run("sgd"), torch.device(name)) for name in ("cpu", "cuda")}


def losses(trainer, epochs=EPOCHS):
    return [trainer.train_epoch().loss for _ in range(epochs)]


def assert_close(found, expected, bound):
    assert expected[-1] < 0.9 * expected[0]  # it learns
    assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) <= bound


@pytest.mark.parametrize("name", METHODS)
def test_the_gpu_agrees_with_the_cpu(data, name):
    # Two epochs: later a loss is so small that it shows how each device rounds.
    on_cpu, on_gpu = (losses(Trainer(make_run(name), data[device]), 2) for device in ("cpu", "cuda"))
    assert_close(on_gpu, on_cpu, 1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_agrees_with_a_whole_one(data, name):
    run = make_run(name, 0.5)
    whole = losses(Trainer(run, data["cuda"]))
    first, resumed = Trainer(run, data["cuda"]), Trainer(run, data["cuda"])
    begun = losses(first, 2)
    resumed.load_state_dict(first.state_dict())
    assert_close(begun + losses(resumed, EPOCHS - 2), whole, 1e-5)
