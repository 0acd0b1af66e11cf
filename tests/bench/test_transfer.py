"""``benchmarks/transfer``: that every network trains; that jobs, rates and tables are right."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.muon import Muon, orthogonalize
from benchmarks.transfer import __main__ as command
from benchmarks.transfer import plan, run, summary, tasks, train
from benchmarks.transfer.methods import default_rate, label, make_optimizer, parse
from benchmarks.transfer.networks import NETWORKS
from benchmarks.transfer.pack import BYTES, SOURCES, pack_folder, read_cifar
from benchmarks.transfer.records import Cell, cells_of, read_jobs, read_records, without_recorded
from benchmarks.transfer.table import render
from benchmarks.transfer.tasks import Images, Text
from benchmarks.transfer.train import Job, run_job

RESULTS = Path(__file__).parents[2] / "results"


def noise(*shape, steps=2, batch=2, **options):
    x, y = torch.randn(6, *shape), torch.randint(10, (6,))
    return Images(x, y, x[:4], y[:4], steps, batch, metric="error", **{"flip": False, **options})


def letters(context, steps=2, batch=1):
    text = torch.randint(256, (400,), dtype=torch.uint8)
    return Text(text, text, steps, batch, context, pieces=2)


@pytest.fixture
def tiny(monkeypatch):
    """The same tasks on a handful of random data."""
    made = {
        "cifar": noise(3, 32, 32), "cifar flipped": noise(3, 32, 32, flip=True),
        "digits": replace(noise(1, 8, 8), metric="loss"), "bytes": letters(128), "short bytes": letters(64),
    }  # fmt: skip
    assert set(made) == set(tasks.TASKS)
    monkeypatch.setattr(train, "load_task", lambda name, folder, device: made[name])


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_trains(tiny, tmp_path, network):
    record = run_job(Job(network, "adamw", 1e-3, epochs=1), tmp_path, "cpu")
    assert "failure" not in record
    assert math.isfinite(record["value"])


def test_every_start_computes_the_same(tiny, tmp_path):
    jobs = [Job("digits-rnn", "sgd", 0.0, start, epochs=1) for start in train.STARTS]
    losses = [run_job(job, tmp_path, "cpu")["losses"][0] for job in jobs]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)


def test_a_start_names_the_orders_of_balance():
    assert train.parse_start("unbalanced+balance(2,inf)") == ("unbalanced", {"p": 2, "q": math.inf})
    with pytest.raises(ValueError, match="there is no start"):
        train.parse_start("balanced+balance(2)")


def test_a_job_that_fails_or_diverges_is_recorded(tiny, tmp_path):
    failed = run_job(Job("digits-vit", "adamw:spin=1", 1e-3), tmp_path, "cpu")
    assert failed["failure"].startswith("TypeError")
    diverged = run_job(Job("mlp-128x3", "sgd", 1e30, epochs=3), tmp_path, "cpu")
    assert (diverged["diverged"], diverged["value"], len(diverged["losses"])) == (True, None, 1)


def test_options_of_a_method():
    assert parse("balanced-muon:growth=0.25,mode=slow,betas=[0.9,0.99]") == (
        "balanced-muon", {"growth": 0.25, "mode": "slow", "betas": [0.9, 0.99]},
    )  # fmt: skip
    assert label("muon:adamw_lr=0.01") == label("muon")
    assert label("balanced-muon:growth=0") != label("balanced-muon")
    network = NETWORKS["mlp-128x3"].build()
    optimizer = make_optimizer("balanced-muon", network, torch.zeros(1, 3, 32, 32), None)
    assert optimizer.param_groups[0]["lr"] == default_rate("balanced-muon")
    with pytest.raises(ValueError, match="there is no method"):
        parse("lion")


def test_recorded_methods_can_be_read_but_not_run():
    assert label("path-muon:radial=0") == "PathMuon (radial=0)"
    assert label("balanced-muon:set=pathsgd.muon.upkeep.MOST=1.0") == "BalancedMuon (MOST=1.0)"
    with pytest.raises(ValueError, match="PathMuon was removed"):
        make_optimizer("path-muon", nn.Linear(1, 1), None, None)
    table = render(read_records([RESULTS / "transfer"]))
    assert table.partition("## 5 epochs: the weights")[2].count("PathMuon on weights") > 1
    text = summary.summarize(read_records([RESULTS / "balance"]))
    assert "| no growth |" in text
    assert "set=" not in text


def test_muon_steps_as_written_out():
    model = nn.Sequential(
        nn.Conv2d(2, 30, 3), nn.ReLU(), nn.Conv2d(30, 30, 1), nn.Flatten(), nn.Linear(30, 4)
    )
    optimizer = Muon(model, lr=0.1, adamw_lr=0.01)
    weight, momentum = model[0].weight.detach().clone(), torch.zeros(30, 18)
    twin = nn.Parameter(model[4].weight.detach().clone())
    adamw = torch.optim.AdamW([twin], 0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 2, 3, 3)).square().sum().backward()
        gradient = model[0].weight.grad.reshape(30, 18)
        momentum = 0.95 * momentum + gradient
        step = orthogonalize((gradient + 0.95 * momentum)[None])[0]
        weight -= 0.1 * (30 / 18) ** 0.5 * step.reshape(weight.shape)
        twin.grad = model[4].weight.grad.clone()
        adamw.step()
        optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), weight)
    torch.testing.assert_close(model[4].weight, twin)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def test_packed_images_are_the_same(tmp_path):
    for name in SOURCES:
        rows = torch.randint(256, (7, BYTES), dtype=torch.uint8)
        rows[:, 1:] //= 16  # most differences are small, some wrap around
        (tmp_path / name).write_bytes(rows.numpy().tobytes())
    pack_folder(tmp_path, tmp_path / "packed")
    packed, published = read_cifar(tmp_path / "packed"), read_cifar(tmp_path)
    assert [len(t) for t in packed] == [14, 14, 7, 7]
    assert all(a.equal(b) for a, b in zip(packed, published, strict=True))


def test_recorded_jobs_are_not_run_again(tiny, tmp_path, capsys):
    jobs = [Job("digits-rnn", "sgd", 0.1, epochs=1), Job("digits-rnn", "sgd:spin=1", 0.1, epochs=1)]
    assert run.run_jobs(jobs, tmp_path, tmp_path, device="cpu") == 0
    assert run.run_jobs(jobs[:1] * 2, tmp_path, tmp_path, device="cpu") == 0
    assert "0 jobs on cpu" in capsys.readouterr().out
    assert without_recorded(jobs, read_records([tmp_path])) == jobs[1:]
    assert run.run_jobs(jobs[1:], tmp_path, tmp_path, device="cpu", seconds=-1) == 1


def record(network, method, lr, value, start="balanced", seed=0, epochs=5, rate=None):
    return {
        "network": network, "method": method, "lr": lr, "start": start, "seed": seed, "epochs": epochs,
        "rate": rate or lr, "metric": "error", "value": value, "diverged": value is None,
    }  # fmt: skip


RATES = [
    *(record("vgg-16", "adamw", lr, value) for lr, value in ((3e-3, 30.0), (1e-2, 25.0), (3e-2, None))),
    *(record("vgg-16", "muon:adamw_lr=0.01", lr, value) for lr, value in ((1e-2, 22.0), (3e-2, 21.0))),
    *(record("vgg-16", "sgd", lr, value) for lr, value in ((1e-2, 28.0), (3e-2, 27.0), (1e-1, 29.0))),
    record("vgg-16", "path-muon", 0.004, 19.0), record("vgg-16", "path-muon", 0.4, 40.0),
    record("vgg-16", "path-muon", None, 20.0, rate=0.04),
]  # fmt: skip


def planned(stage, **options):
    return plan.plan(stage, plan.Setting(["vgg-16"], **options), RATES)


def test_rates_are_planned_over_their_grids():
    jobs = planned("rates")
    assert {job.lr for job in jobs if job.method == "sgd"} == set(plan.GRIDS["sgd"])
    assert {job.method for job in jobs} == {"sgd", "adamw", "muon:adamw_lr=0.01"}
    assert len(without_recorded(jobs, RATES)) == len(jobs) - 8
    longer = planned("rates", epochs=30, methods=["adamw"])
    assert [(job.lr, job.epochs) for job in longer] == [(3e-3, 30), (1e-2, 30), (3e-2, 30)]


def test_seeds_are_planned_at_the_best_rate_or_the_default():
    jobs = planned("seeds", methods=["adamw", "muon", "balanced-muon"], starts=["unbalanced"])
    assert {(job.method, job.lr) for job in jobs} == {
        ("adamw", 1e-2), ("muon:adamw_lr=0.01", 3e-2), ("balanced-muon", None),
    }  # fmt: skip
    assert sorted(job.seed for job in jobs) == sorted([0, 1, 2] * 3)
    starts = {job.start for job in planned("rebalanced", methods=["adamw"])}
    assert starts == {"balanced+balance", "unbalanced+balance"}


def test_the_usual_rate_is_planned_from_every_start():
    starts = {}
    for job in planned("balance", starts=train.STARTS):
        starts.setdefault((job.method, job.lr), {}).setdefault(job.start, []).append(job.seed)
    plain = {start: [0, 1, 2] for start in train.STARTS}
    relative = {start: [0, 1, 2] for start in ("balanced", "unbalanced")}
    assert starts == {
        ("balanced-muon", None): relative,
        ("adamw", 1e-2): plain, ("muon:adamw_lr=0.01", 3e-2): plain,
    }  # fmt: skip


def test_rates_are_planned_around_the_default():
    default = default_rate("balanced-muon")
    rates = [default if job.lr is None else job.lr for job in planned("around-default")]
    assert rates == pytest.approx([default * 10 ** (k / 2) for k in (-2, -1, 0, 1, 2)], rel=1e-2)


def test_mean_and_spread_of_seeds():
    assert Cell((1.0, 3.0), None, 0.1, "sgd").mean == 2
    assert Cell((1.0, 3.0), None, 0.1, "sgd").spread == pytest.approx(2**0.5)
    assert math.isinf(Cell((1.0, None), None, 0.1, "sgd").mean)
    ((cell,),) = cells_of([record("vgg-16", "sgd", 0.1, v, seed=s) for s, v in ((1, 3.0), (0, 1.0))]).values()
    assert cell.values == (1.0, 3.0)


def test_tables_say_who_is_ahead_and_where_not():
    text = render(RATES)
    assert "| VGG, 16 channels | 27.0 (0.03) | 25.0 (0.01) | 21.0 (0.03) | **20.0** |" in text
    assert "best-tuned SGD, AdamW and Muon: 1 of 1 networks." in text
    assert "| VGG, 16 channels | 0.03 | 0.01 | 0.004, edge of the grid |" in text  # Muon: two rates only
    behind = [record("vgg-16", "path-muon", None, 22.0, seed=s, rate=0.04) for s in range(3)]
    assert "0 of 1 networks. Not: VGG, 16 channels 22.0 against 21.0." in render(RATES[:-1] + behind)


def seeds(method, values, start="balanced", network="vgg-16"):
    lr = None if method.startswith(("path", "balanced")) else 0.1
    return [record(network, method, lr, v, start, s, rate=0.1) for s, v in enumerate(values)]


def test_a_summary_says_what_is_as_good_within_the_spread_of_seeds():
    runs = [
        *seeds("path-muon", (19.0, 20.0, 21.0)), *seeds("path-muon", (19.0, 20.0, 21.0), "unbalanced"),
        *seeds("balanced-muon", (20.5, 21.5, 22.5)),
        *seeds("balanced-muon", (17.0, 18.0, 19.0), "unbalanced"),
        *seeds("adamw", (24.0, 25.0, 26.0)), *seeds("adamw", (27.5, 28.5, 29.5), "unbalanced+balance"),
        *seeds("muon", (24.0, 25.0, 26.0)), *seeds("muon", (24.0, None, 25.0), "unbalanced+balance"),
    ]  # fmt: skip
    text = summary.summarize(runs)
    assert "| 20.0 ± 1.0 | 20.0 ± 1.0 | 21.5 ± 1.0 | 18.00 ± 1.00 | 25.0 ± 1.0 (0.1) |" in text
    assert "| VGG, 16 channels | yes (+1.5; -2.0) | no (+3.5) | no (+inf) |" in text
    assert "| yes | 1 of 1 | 0 of 1 | 0 of 1 |" in text
    assert "1 of 25 runs failed" in summary.summarize([*runs, {**runs[0], "seed": 9, "failure": "Oh"}])


def test_the_commands_write_table_and_figure(tmp_path, capsys):
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RATES))
    jobs = tmp_path / "jobs.json"
    where = ["--records", str(tmp_path)]
    arguments = ["plan", "seeds", str(jobs), *where, "--networks", "vgg-16", "--methods", "adamw"]
    assert command.main(arguments) == 0
    assert f"{jobs}: 5 jobs" in capsys.readouterr().out
    assert len(json.loads(jobs.read_text())) == 5
    assert command.main(["plan", "rates", str(jobs), *where, "--epochs", "30"]) == 0
    assert {job["network"] for job in json.loads(jobs.read_text())} == set(plan.LONG)
    assert command.main(["plan", "balance", str(jobs), *where, "--networks", "vgg-16"]) == 0
    assert len(read_jobs(jobs)) == 30  # what was recorded before is run again
    assert command.main(["summary", str(tmp_path)]) == 0
    assert "## 5 epochs: results" in capsys.readouterr().out
    assert command.main(["table", str(tmp_path), "--into", str(tmp_path)]) == 0
    assert command.main(["figure", str(tmp_path), "--into", str(tmp_path)]) == 0
    assert (tmp_path / "table.md").read_text().startswith("# One learning rate")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
