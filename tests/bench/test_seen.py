"""The networks of ``benchmarks/league/seen``: each is built, trained and evaluated on what its task gives.
torchvision is no dependency here: ``pytest -m gpu`` runs its networks, where it is there."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.league import seen_tasks
from benchmarks.league.baselines.matrices import hidden_matrices
from benchmarks.league.networks import NETWORKS
from benchmarks.league.seen import SEEN
from benchmarks.league.seen_tasks import SEEN_TASKS
from benchmarks.league.tasks import TASKS, Images, Text

OF_TORCHVISION = {"resnet18", "vit", "swin", "densenet", "regnet", "vgg11"}
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"}
"""Operations that wait for the GPU: a step with one cannot be captured."""


class Operations(TorchDispatchMode):
    """Notes the operations that are run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def some_images(folder, device):
    x, y = torch.randn(20, 3, 32, 32), torch.randint(10, (20,))
    return Images(x, y, {"valid": (x[:2], y[:2]), "test": (x[2:4], y[2:4])}, steps=2, batch=2)


@pytest.fixture
def load(monkeypatch):
    """The task of a network, on random data where it would read files; a step is two examples."""
    text = torch.randint(256, (400,), dtype=torch.uint8)
    letters = Text(dict.fromkeys(("train", "valid", "test"), text), 2, 2, context=128, pieces=2)
    random = {"cifar flipped": some_images(Path(), "cpu"), "bytes": letters}
    monkeypatch.setattr(seen_tasks, "cifar", some_images)

    def load(network):
        task = random.get(network.task) or SEEN_TASKS[network.task](Path(), "cpu")
        return replace(task, batch=2)

    return load


def test_tasks_have_names_of_their_own():
    assert not SEEN_TASKS.keys() & TASKS.keys()
    assert {network.task for network in SEEN.values()} <= SEEN_TASKS.keys() | TASKS.keys()
    assert SEEN.keys() >= OF_TORCHVISION


@pytest.mark.parametrize("name", ["gpt2", "vae"])
def test_matrices_of_all_kinds_of_layers_are_hidden(name):
    """GPT-2's linear layers are transformers' own, and a decoder has transposed convolutions."""
    model = NETWORKS[name].build()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    matrices = [p for p in model.parameters() if p.dim() > 1 and id(p) not in embeddings]
    hidden = sum(p.numel() for p in hidden_matrices(model))
    assert hidden > 0.8 * sum(p.numel() for p in matrices)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gpu] * (name in OF_TORCHVISION)) for name in SEEN]
)
def test_every_network_is_trained_and_evaluated(load, name):
    torch.manual_seed(0)
    model, task = SEEN[name].build(), load(SEEN[name])
    (batch,) = task.batches(model, torch.Generator().manual_seed(0), steps=1)
    with Operations() as operations:
        loss = task.loss(model, batch)
        loss.backward()
    assert math.isfinite(loss.item())
    assert all(p.grad is not None for p in model.parameters())
    assert not operations.seen & READS
    for part in ("valid", "test"):
        assert math.isfinite(task.evaluate(model.eval(), part)[task.metric])


@pytest.mark.parametrize("name", {network.task: name for name, network in SEEN.items()}.values())
def test_batches_come_from_the_generator(load, name):
    task = load(SEEN[name])

    def stream(seed):
        return [*task.batches(torch.nn.Identity(), torch.Generator().manual_seed(seed), steps=3)]

    first, again, other = stream(0), stream(0), stream(1)
    for batch, same in zip(first, again, strict=True):
        assert [t.shape for t in batch] == [t.shape for t in first[0]]
        for tensor, copy in zip(batch, same, strict=True):
            torch.testing.assert_close(tensor, copy, rtol=0, atol=0)
    assert any(not torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))


def test_evaluation_draws_the_same_noise(load):
    model, task = SEEN["unet"].build().eval(), load(SEEN["unet"])
    assert task.evaluate(model, "valid") == task.evaluate(model, "valid")


def test_the_picture_is_a_mosaic(monkeypatch):
    images = some_images(Path(), "cpu")
    monkeypatch.setattr(seen_tasks, "cifar", lambda folder, device: images)
    task = SEEN_TASKS["picture"](Path(), "cpu")
    colours = task.y.view(128, 128, 3)
    torch.testing.assert_close(colours[32:64, 64:96], images.x[6].permute(1, 2, 0))
    assert task.x.view(128, 128, 2)[0, -1].tolist() == [-1, 1]


def test_fine_tuning_begins_with_one_body_and_many_heads():
    torch.manual_seed(0)
    one, other = SEEN["fine-tune"].build(), SEEN["fine-tune"].build()
    same = [torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    assert same == [True] * (len(same) - 2) + [False] * 2
