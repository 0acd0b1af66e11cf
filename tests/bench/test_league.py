"""``benchmarks/league``: that every network trains; that searches, jobs, comparisons and tables are right."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch

from benchmarks.league import __main__ as command
from benchmarks.league import train
from benchmarks.league.methods import METHODS, label, make_optimizer, parse, write
from benchmarks.league.networks import ALL_TASKS, NETWORKS, SETS
from benchmarks.league.pack import BYTES, FILES, VALID, pack_folder, read_cifar
from benchmarks.league.plan import CLOSE, Setting, chosen, plan_runs, plan_search, plan_seeds
from benchmarks.league.records import read_records, values_of_search
from benchmarks.league.run import run_jobs
from benchmarks.league.search import Coordinate, best_after, order_trials, propose
from benchmarks.league.table import compare, render
from benchmarks.league.tasks import TASKS, Images, Text
from benchmarks.league.train import Job, run_job


def noise(*shape, **options):
    x, y = torch.randn(6, *shape), torch.randint(10, (6,))
    return Images(x, y, {"valid": (x[:4], y[:4]), "test": (x[4:], y[4:])}, steps=2, batch=2, **options)


def letters(context):
    text = torch.randint(256, (400,), dtype=torch.uint8)
    return Text(dict.fromkeys(("train", "valid", "test"), text), 2, 1, context, pieces=2)


MADE = {
    "cifar": noise(3, 32, 32), "cifar flipped": noise(3, 32, 32, augment="flip"),
    "cifar shifted": noise(3, 32, 32, augment="crop"), "digits": noise(1, 8, 8, metric="loss"),
    "bytes": letters(128), "short bytes": letters(64),
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    """The same tasks on a handful of random data."""
    assert set(MADE) == set(TASKS)
    monkeypatch.setattr(train, "load_task", lambda name, folder, device: MADE[name])


@pytest.mark.parametrize("network", [*SETS["tuned-on"], *SETS["also-tuned-on"]])
def test_every_network_trains(tiny, tmp_path, network):
    record = run_job(Job(network, "adamw:lr=0.001"), tmp_path, "cpu")
    assert "failure" not in record
    assert math.isfinite(record["valid"] + record["test"])
    assert record["steps"] == 2


def test_every_network_has_a_task():
    assert {network.task for network in NETWORKS.values()} <= set(ALL_TASKS)
    assert len(SETS["tuned-on"]) == 8
    assert len(SETS["unseen"]) == 10
    assert sum(map(len, SETS.values())) == len(NETWORKS)


def test_every_start_computes_the_same(tiny, tmp_path):
    jobs = [Job("digits-rnn", "adamw:lr=0.0", start=start) for start in train.STARTS]
    losses = [run_job(job, tmp_path, "cpu")["losses"][0] for job in jobs]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-3)


def test_a_job_that_fails_or_diverges_is_recorded(tiny, tmp_path):
    failed = run_job(Job("digits-vit", "adamw:spin=1"), tmp_path, "cpu")
    assert failed["failure"].startswith("TypeError")
    diverged = run_job(Job("digits-rnn", "adamw:lr=1e30", length=3), tmp_path, "cpu")
    assert (diverged["valid"], diverged["test"]) == (None, None)


def test_length_and_batch_of_a_job(tiny, tmp_path):
    record = run_job(Job("digits-rnn", "adamw", length=5, batch=2), tmp_path, "cpu")
    assert record["steps"] == len(record["losses"]) == 10


@pytest.mark.parametrize("augment", ["", "flip", "crop"])
def test_batches_go_through_all_images(augment):
    x = torch.arange(6.0)[:, None, None, None].expand(6, 1, 5, 5).contiguous()
    task = Images(x, torch.arange(6), {}, steps=6, batch=2, augment=augment)
    seen = [y for batch in task.batches(torch.nn.Identity(), torch.Generator(), 6) for y in batch[1].tolist()]
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    for x, y in task.batches(torch.nn.Identity(), torch.Generator(), 6):
        assert (x == y[:, None, None, None]).all()


def test_options_of_a_method():
    options = {"lr": 0.0005, "weight_decay": 0.1, "betas": [0.9, 0.99]}
    assert parse(write("adamw", options)) == ("adamw", options)
    assert write("balanced-muon", {}) == "balanced-muon"
    assert label("balanced-muon:growth=0") == "BalancedMuon (growth=0)"
    optimizer = make_optimizer("balanced-muon", NETWORKS["mlp-128x3"].build(), torch.zeros(1, 3, 32, 32))
    assert optimizer.param_groups[0]["lr"] == optimizer.default_lr
    with pytest.raises(ValueError, match="there is no method"):
        parse("lion")


RATE, DECAY = Coordinate("lr", 0.01, 2), Coordinate("weight_decay", 0.1, 10)


def search(function, coordinates, limit=100):
    """Runs a search to its end."""
    values = {}
    while new := propose(coordinates, values):
        values |= {point: function(*point) for point in new}
        assert len(values) < limit
    return values


def test_a_search_ends_between_worse_neighbours():
    values = search(lambda lr, decay: abs(math.log(lr / 0.05)) + abs(math.log(decay)), (RATE, DECAY))
    best = min(values, key=values.__getitem__)
    assert best == (0.04, 1.0)
    assert {(0.02, 0.1), (0.08, 0.1)} <= set(values)
    assert len(values) <= 8


def test_a_search_follows_the_rate_past_its_trials_but_nothing_else():
    values = search(lambda lr, decay: -lr if lr < 20 else math.inf, (RATE, DECAY))
    assert min(values, key=values.__getitem__)[0] == pytest.approx(10.24)
    assert {decay for _, decay in values} == {0.1}
    values = search(lambda lr, decay: abs(math.log(lr / 0.01)) - decay, (RATE, DECAY))
    assert len(values) == 8


def test_a_search_is_read_off_after_fewer_trials():
    def function(lr, decay):
        return abs(math.log(lr / 0.05)) + 0.1 * abs(math.log(decay))

    values = search(function, (RATE, DECAY))
    order = order_trials((RATE, DECAY), values)
    assert sorted(order) == sorted(values)
    assert order[0] == (0.01, 0.1)
    assert best_after(1, order, values) == (0.01, 0.1)
    assert best_after(3, order, values) == (0.02, 0.1)
    assert best_after(8, order, values) == (0.04, 1.0)
    assert best_after(1, order, {**values, (0.01, 0.1): math.inf}) is None


def test_recorded_jobs_are_not_run_again(tiny, tmp_path, capsys):
    plan = partial(plan_runs, Setting(["digits-rnn"], ["adamw", "adamw:spin=1"]))
    assert run_jobs(plan, tmp_path / "a", tmp_path, device="cpu") == 2
    assert run_jobs(plan, tmp_path / "b", tmp_path, known=[tmp_path / "a"], device="cpu") == 0
    more = partial(plan_runs, Setting(["digits-rnn"], ["adamw"], seeds=(0, 1)))
    assert run_jobs(more, tmp_path / "a", tmp_path, device="cpu") == 1
    assert run_jobs(more, tmp_path / "c", tmp_path, device="cpu", seconds=-1) == 0
    assert len(read_records([tmp_path / "a"])) == 3
    assert "digits-rnn adamw:spin=1 seed 0: TypeError" in capsys.readouterr().out


def test_stages_on_recorded_numbers(monkeypatch, tmp_path):
    """A search on made-up numbers, then seeds of what it chose."""

    def make_record(job):
        name, options = parse(job.method)
        value = 1 + 0.01 * job.seed
        if name == "adamw":
            value += 0.02 + abs(math.log(options["lr"] / 0.002))
        losses = [value + 4 - k if name == "adamw" else value + 3.5 - 2 * k for k in range(5)]
        return {**vars(job), "valid": value, "test": 10 * value, "seconds": 1.0, "losses": losses}

    monkeypatch.setattr("benchmarks.league.run.run_job", lambda job, *_: make_record(job))
    networks = ["digits-rnn", "digits-vit"]
    setting = Setting(networks, ["adamw"])
    run_jobs(partial(plan_search, setting), tmp_path, tmp_path, device="cpu")
    records = read_records([tmp_path])
    values = values_of_search(records, "digits-rnn", "adamw", "valid")
    assert min(values, key=values.__getitem__) == (0.002, 0.01)
    assert plan_search(setting, records) == []
    assert chosen(records, "digits-rnn", "adamw") == "adamw:lr=0.002,weight_decay=0.01"
    assert chosen(records, "digits-rnn", "adamw", 1) == "adamw:lr=0.001,weight_decay=0.01"

    both = Setting(networks, ["adamw", "balanced-muon"])
    run_jobs(partial(plan_seeds, both), tmp_path, tmp_path, device="cpu")
    records = read_records([tmp_path])
    assert len({job for job in records if job.method == "balanced-muon"}) == 2 * 5  # 2% is close
    assert CLOSE > 0.02
    text = render(records)
    assert (
        "| nn.RNN, digits | AdamW (lr=0.002, weight_decay=0.01) | 10.4 | 10.2 | 0.981 ± 0.000 | 5 | ahead |"
        in text
    )
    assert "Of 2: ahead on 2, within 2% on 0, behind on 0, far behind on 0." in text
    assert "| nn.RNN, digits | 17.1 / 10.2 / 10.2 |" in text
    steps = text.partition("| steps to the loss of AdamW |")[2].splitlines()
    assert steps[2].endswith(" | 60% |")  # 3.5, 1.5 and -0.5 against 0.02


def test_a_comparison_is_paired():
    ratio, half = compare({0: 1.0, 1: 2.2, 2: 3.0}, {0: 1.1, 1: 2.1, 2: 3.4, 3: 9.0})
    differences = torch.tensor([-0.1, 0.1, -0.4])
    assert ratio == pytest.approx(1 + differences.mean().item() / 2.2)
    assert half == pytest.approx(4.30 * differences.std().item() / 3**0.5 / 2.2)
    assert compare({0: math.inf, 1: 1.0}, {0: 1.0, 1: 1.0})[0] == math.inf


def test_packed_images_are_the_same(tmp_path):
    for name in FILES.values():
        rows = torch.randint(256, (7, BYTES), dtype=torch.uint8)
        rows[:, 1:] //= 16  # most differences are small, some wrap around
        (tmp_path / name).write_bytes(rows.numpy().tobytes())
    pack_folder(tmp_path, tmp_path / "packed")
    packed, published = read_cifar(tmp_path / "packed"), read_cifar(tmp_path)
    assert [len(y) for _, y in packed.values()] == [14, 7, 7]
    assert all(a.equal(b) for part in packed for a, b in zip(packed[part], published[part], strict=True))
    assert VALID < 10000
    assert "test_batch.bin" not in FILES.values()


def test_the_command(tiny, tmp_path, capsys):
    arguments = [
        "run",
        "runs",
        str(tmp_path),
        "--networks",
        "digits-rnn",
        "--methods",
        "adamw",
        "--device",
        "cpu",
    ]
    assert command.main([*arguments, "--records"]) == 0
    assert command.main(["table", str(tmp_path)]) == 0
    assert "# The league" in capsys.readouterr().out
    assert json.loads((tmp_path / "records.jsonl").read_text())["network"] == "digits-rnn"
    with pytest.raises(SystemExit, match="there is no network"):
        command.main([*arguments[:4], "alexnet", *arguments[5:]])
    assert set(METHODS) >= {"adamw", "muon", "muonh", "schedule-free", "balanced-muon"}


def test_the_page_shows_the_records():
    assert (command.RESULTS / "table.md").read_text() == render(read_records([command.RESULTS]))
