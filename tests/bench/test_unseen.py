"""The unseen networks of ``benchmarks/league``: that each can be trained and evaluated, and that data and
dynamics are those published. ``pytest -m gpu`` captures a step of each in a CUDA graph, and runs those of
torchvision, which is no dependency here."""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.league import unseen_control
from benchmarks.league.tasks import TASKS, Images, Text
from benchmarks.league.unseen import UNSEEN
from benchmarks.league.unseen_control import CartPole
from benchmarks.league.unseen_pack import pack_unseen, read_packed
from benchmarks.league.unseen_tasks import UNSEEN_TASKS, Autoencoding, adult, cora
from benchmarks.league.unseen_text import MASK, SPAN_TOKENS, SPANS, SPECIAL, Masked, Spans

PAPERS, TEST = 700, 50
OF_TORCHVISION = {"mobilenet-v3", "efficientnet-b0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both data sets, made up, in the formats they were published in and then packed."""
    source = tmp_path_factory.mktemp("source")
    words = np.zeros((PAPERS, 1433), np.float32)
    words[np.arange(PAPERS), np.arange(PAPERS)] = words[:, 1000] = 1  # paper k has the words k and 1000
    classes = np.eye(7, dtype=np.int32)[np.arange(PAPERS) % 7]
    places = np.arange(PAPERS - TEST, PAPERS)[::-1]
    graph = defaultdict(list, {0: [1, 1, 699, 0], 1: [0], 699: [0]})
    parts = {
        "allx": sparse.csr_matrix(words[:-TEST]), "ally": classes[:-TEST],
        "tx": sparse.csr_matrix(words[places]), "ty": classes[places], "graph": graph,
    }  # fmt: skip
    for name, part in parts.items():
        (source / f"ind.cora.{name}").write_bytes(pickle.dumps(part, protocol=2))
    (source / "ind.cora.test.index").write_text("".join(f"{place}\n" for place in places))

    kinds = (9, 16, 7, 15, 6, 5, 2, 42)  # of words in each column
    for part, count, dot in (("train", 300, ""), ("test", 60, ".")):
        lines = []
        for k in range(count):
            w = iter([f"w{k % kind}" for kind in kinds])
            row = [
                20 + k, next(w), 1000 * k, next(w), 9, next(w), next(w), next(w), next(w), next(w),
                0, k % 3, 40, next(w), ("<=50K", ">50K")[k % 4 == 0] + dot,
            ]  # fmt: skip
            row[4], row[10], row[12] = k % 16, k % 5, 30 + k % 20
            lines.append(", ".join(map(str, row)))
        (source / f"adult-{part}.csv").write_text("\n".join(lines) + "\n\n")
    target = tmp_path_factory.mktemp("packed")
    files = pack_unseen(source, target)
    assert [file.name for file in files] == ["cora.npz", "adult.npz"]
    return target


def test_cora(folder):
    task = cora(folder, "cpu")
    assert task.labels.tolist() == [k % 7 for k in range(PAPERS)]
    assert torch.equal(task.features.argmax(1), torch.arange(PAPERS))
    assert task.features[5, [5, 1000]].tolist() == [0.5, 0.5]
    neighbours = task.adjacency[0].nonzero()[:, 0].tolist()
    assert neighbours == [0, 1, 699]
    assert task.adjacency[0, 1].item() == pytest.approx(1 / math.sqrt(3 * 2))
    assert torch.equal(task.adjacency, task.adjacency.T)
    assert task.rows["test"].tolist() == list(range(PAPERS - TEST, PAPERS))
    assert len(set(task.rows["train"].tolist()) | set(task.rows["valid"].tolist())) == 640


def test_adult(folder):
    task = adult(folder, "cpu")
    (valid, _), (test, rich) = task.held_out["valid"], task.held_out["test"]
    assert (task.x.shape, len(valid), len(test)) == ((240, 108), 60, 60)
    assert rich.tolist() == [float(k % 4 == 0) for k in range(60)]
    assert task.x[:, :6].mean(0).abs().max() < 1e-5
    assert torch.equal(task.x[:, 6:].sum(1), torch.full((240,), 8.0))
    ages = torch.cat([task.x, valid])[:, 0].unique()
    assert len(ages) == 300  # no row is in both parts


def test_a_hash_is_of_the_contents(folder, tmp_path):
    arrays, digest = read_packed(folder / "cora.npz")
    np.savez(tmp_path / "same.npz", **arrays)
    np.savez(tmp_path / "other.npz", **{**arrays, "classes": arrays["classes"][::-1]})
    assert read_packed(tmp_path / "same.npz")[1] == digest != read_packed(tmp_path / "other.npz")[1]


def small(name, folder, device="cpu"):
    """The task of a network, on a handful of data."""
    letters = torch.randint(256, (3, 400), dtype=torch.uint8, device=device)
    parts = dict(zip(("train", "valid", "test"), letters, strict=True))
    text = Text(parts, steps=2, batch=2, context=40, pieces=3)
    x, y = torch.randn(6, 3, 32, 32, device=device), torch.randint(10, (6,), device=device)
    held_out = {"valid": (x[:2], y[:2]), "test": (x[2:4], y[2:4])}
    return {
        "masked bytes": lambda: Masked(**vars(text)),
        "spans of bytes": lambda: Spans(**vars(text)),
        "bytes": lambda: text,
        "short bytes": lambda: replace(text, context=4),
        "cora": lambda: cora(folder, device),
        "adult": lambda: adult(folder, device),
        "cart-pole": lambda: CartPole(device, batch=8, carts=4, horizon=4, episodes=3, longest=20),
        "cifar shifted": lambda: Images(x, y, held_out, 2, 2, augment="crop"),
        "cifar autoencoding": lambda: Autoencoding(x, y, held_out, 2, 2, metric="negative ELBO"),
    }[UNSEEN[name].task]()


class WaitsForNothing(TorchDispatchMode):
    """What reads a number of a tensor, or copies one from the CPU, cannot be captured in a CUDA graph."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        forbidden = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select")
        assert not any(name in str(function) for name in forbidden), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gpu] * (name in OF_TORCHVISION)) for name in UNSEEN]
)
def test_every_network(folder, name):
    network, task = UNSEEN[name], small(name, folder)
    assert network.task in TASKS | UNSEEN_TASKS
    torch.manual_seed(0)
    model = network.build().train()
    batches, again = (list(task.batches(model, torch.Generator().manual_seed(5), 3)) for _ in range(2))
    assert len(batches) == 3
    torch.testing.assert_close(batches, again, rtol=0, atol=0)
    assert len({tuple(tensor.shape for tensor in batch) for batch in batches}) == 1

    with WaitsForNothing():
        loss = task.loss(model, batches[0])
        loss.backward()
    assert loss.isfinite()
    assert not [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]

    model.eval()
    example = task.example if isinstance(task.example, tuple) else (task.example,)
    model(*example)
    numbers = {part: task.evaluate(model, part) for part in ("valid", "test")}
    assert all(math.isfinite(number) for part in numbers.values() for number in part.values())
    assert all(task.metric in part for part in numbers.values())
    assert numbers["valid"] != numbers["test"]
    assert numbers["valid"] == task.evaluate(model, "valid")


@pytest.mark.gpu
@pytest.mark.parametrize("name", UNSEEN)
def test_every_network_is_captured(folder, name):
    network, task = UNSEEN[name], small(name, folder, "cuda")
    model = network.build().cuda().train()
    batch = next(task.batches(model, torch.Generator("cuda").manual_seed(5), 1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            task.loss(model, batch).backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = task.loss(model, batch)
        loss.backward()
    graph.replay()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    assert math.isfinite(task.evaluate(model, "valid")[task.metric])


def test_a_masked_text_asks_for_some_of_what_was_there():
    clean = torch.randint(256, (200, 128))
    text = Masked({"train": clean}, steps=1, batch=200, context=128)
    read, answer = text.corrupt(clean, torch.Generator().manual_seed(0))
    asked = answer >= 0
    assert torch.equal(answer[asked], clean[asked])
    assert torch.equal(read[~asked], clean[~asked])
    assert asked.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (read[asked] == MASK).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (read[asked] == clean[asked]).float().mean().item() == pytest.approx(0.1, abs=0.03)


def test_spans_put_back_give_the_text():
    clean = torch.randint(256, (20, 128))
    text = Spans({"train": clean}, steps=1, batch=20, context=128)
    read, before, answer = text.corrupt(clean, torch.Generator().manual_seed(0))
    assert (read.shape[1], answer.shape[1]) == (128 - 19 + SPANS + 1, 19 + SPANS + 1)
    assert [tensor.shape[1] for tensor in text.example] == [read.shape[1], answer.shape[1]]
    assert torch.equal(before[:, 1:], answer[:, :-1])
    assert not before[:, 0].any()
    assert max(read.max(), answer.max()) < SPAN_TOKENS
    lengths = set()
    for row in range(20):
        gone, tokens = {}, answer[row].tolist()
        assert tokens.pop() == 1
        for token in tokens:
            if token >= SPECIAL + 256:
                gone[token] = span = []
            else:
                span.append(token)
        whole = [t for token in read[row, :-1].tolist() for t in gone.get(token, [token])]
        assert whole == (clean[row] + SPECIAL).tolist()
        lengths |= {len(span) for span in gone.values()}
    assert min(lengths) == 1
    assert max(lengths) > 5


def test_carts_move_as_in_gym():
    generator = torch.Generator().manual_seed(0)
    state = unseen_control.start(5, generator).double()
    assert state.abs().max() <= 0.05
    expected = state.tolist()
    fallen = torch.zeros(5, dtype=torch.bool)
    for _ in range(60):
        right = torch.rand(5, generator=generator) < 0.7
        state, fallen = unseen_control.move(state, right)
        for cart, (x, x_dot, theta, theta_dot) in enumerate(expected):
            force = 10.0 if right[cart] else -10.0
            temp = (force + 0.05 * theta_dot**2 * math.sin(theta)) / 1.1
            thetaacc = (9.8 * math.sin(theta) - math.cos(theta) * temp) / (
                0.5 * (4.0 / 3.0 - 0.1 * math.cos(theta) ** 2 / 1.1)
            )
            xacc = temp - 0.05 * thetaacc * math.cos(theta) / 1.1
            expected[cart] = [
                x + 0.02 * x_dot, x_dot + 0.02 * xacc, theta + 0.02 * theta_dot, theta_dot + 0.02 * thetaacc,
            ]  # fmt: skip
        assert state.numpy() == pytest.approx(np.array(expected), rel=1e-5, abs=1e-6)
        limits = [abs(x) > 2.4 or abs(theta) > 12 * 2 * math.pi / 360 for x, _, theta, _ in expected]
        assert fallen.tolist() == limits
    assert fallen.any()


def test_advantages_up_to_an_end_and_beyond_the_horizon():
    task = CartPole("cpu", discount=0.5, trace=1.0)
    values = torch.tensor([[1.0], [2.0], [3.0], [8.0]])
    ends = torch.tensor([[False], [True], [False]])
    advantages = task._advantages(values, ends)
    assert advantages[:, 0].tolist() == [1 + 0.5 - 1, 1 - 2, 1 + 0.5 * 8 - 3]


def test_episodes_end():
    task = CartPole("cpu", carts=3, episodes=4, longest=7, horizon=20)
    model = torch.nn.Linear(4, 3)
    state, age, played = task._play(
        model, torch.zeros(3, 4), torch.zeros(3), torch.Generator().manual_seed(0)
    )
    assert age.tolist() == [20 % 7] * 3  # in seven steps no pole falls
    assert state.abs().max() < 2
    assert [tensor.shape[0] for tensor in played] == [60] * 5
    assert task.evaluate(model, "test") == {"inverse return": 1.0, "return": 7.0}
