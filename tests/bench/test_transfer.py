"""``benchmarks/transfer``: that every network trains; that jobs, rates and tables are right."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from transfer import __main__ as command
from transfer import ablations, methods, plan, run, summary, tasks, train
from transfer.methods import constants_set, default_rate, label, make_optimizer, parse
from transfer.networks import NETWORKS
from transfer.pack import BYTES, SOURCES, pack_folder, read_cifar
from transfer.records import Cell, cells_of, read_jobs, read_records, without_recorded
from transfer.table import render
from transfer.tasks import Images, Text
from transfer.train import Job, run_job, warm_up_and_cosine

import pathsgd
from pathsgd.console.muon import Muon, hidden_matrices, orthogonalize


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
    assert record["rate"] == 1e-3
    assert math.isfinite(record["value"])


@pytest.mark.parametrize("network", ["digits-conv8", "digits-rnn", "digits-vit", "gpt-48"])
def test_every_start_computes_the_same(tiny, tmp_path, network):
    losses = [
        run_job(Job(network, "sgd", 0.0, start, epochs=1), tmp_path, "cpu")["losses"][0]
        for start in train.STARTS
    ]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)
    model, paths = (
        NETWORKS[network].build(),
        train._trace(network, train.load_task(NETWORKS[network].task, "", "")),
    )
    before = [p.clone() for p in model.parameters()]
    train.set_start(model, paths, "unbalanced")
    assert any((p / q - 1).abs().max() > 1 for p, q in zip(model.parameters(), before, strict=True))


def test_a_start_names_the_orders_of_balance(monkeypatch):
    calls = []
    monkeypatch.setattr(pathsgd, "balance", lambda model, paths, **orders: calls.append(orders))
    for start in ("balanced", "balanced+balance", "balanced+balance(2,inf)", "balanced+balance(4,1)"):
        train.set_start(nn.Linear(1, 1), None, start)
    assert calls == [{}, {"p": 2, "q": math.inf}, {"p": 4, "q": 1}]
    for start in ("", "balance", "balanced+balance(2)", "unbalanced+balance(2,4", "balanced+unbalance"):
        with pytest.raises(ValueError, match="there is no start"):
            train.parse_start(start)


def test_a_traced_graph_serves_every_copy_of_a_network(tiny, tmp_path):
    job = Job("digits-conv8", "path-sgd", 1e-6, "unbalanced", seed=1, epochs=1)
    run_job(replace(job, seed=0), tmp_path, "cpu")
    again = run_job(job, tmp_path, "cpu")
    train._traced.cache_clear()
    assert run_job(job, tmp_path, "cpu")["losses"] == again["losses"]


def test_a_job_that_cannot_run_says_why(tiny, tmp_path):
    record = run_job(Job("digits-vit", "adamw:spin=1", 1e-3), tmp_path, "cpu")
    assert record["failure"].startswith("TypeError")
    assert "value" not in record


def test_a_job_that_diverges_is_marked_and_ends(tiny, tmp_path):
    record = run_job(Job("mlp-128x3", "sgd", 1e30, epochs=3), tmp_path, "cpu")
    assert record["diverged"]
    assert record["value"] is None
    assert len(record["losses"]) == 1


def test_images_are_seen_once_an_epoch_and_flipped_half_of_the_time():
    task = replace(
        noise(1, 1, 2, steps=40, batch=30), x=torch.tensor([[1.0, 2.0]]).repeat(1200, 1)[:, None, None]
    )
    task = replace(task, y=torch.arange(1200))
    seen = torch.cat([y for _, y in task.epoch(torch.Generator().manual_seed(0))])
    assert seen.sort().values.equal(torch.arange(1200))
    flipped = torch.cat([x for x, _ in replace(task, flip=True).epoch(torch.Generator().manual_seed(0))])
    assert (flipped[:, 0, 0, 0] == 2).float().mean() == pytest.approx(0.5, abs=0.05)


def test_text_is_asked_for_its_next_byte():
    task = replace(letters(8, batch=5), train=torch.arange(200, dtype=torch.uint8))
    for x, y in task.epoch(torch.Generator().manual_seed(0)):
        assert x.shape == (5, 8)
        assert y.equal(x + 1)


def test_the_rate_warms_up_and_ends_at_zero():
    factor = warm_up_and_cosine(100)
    assert [factor(0), factor(100)] == pytest.approx([0.2, 0], abs=1e-6)
    assert factor(4) == pytest.approx(max(map(factor, range(101))))


def test_options_of_a_method():
    assert parse("path-muon:radial=0.25,coordinates=gamma,betas=[0.9,0.99]") == (
        "path-muon", {"radial": 0.25, "coordinates": "gamma", "betas": [0.9, 0.99]},
    )  # fmt: skip
    assert label("muon:adamw_lr=0.01") == label("muon")
    assert label("path-muon:radial=0") != label("path-muon")
    assert (
        default_rate("path-adam")
        == make_optimizer(
            "path-adam", NETWORKS["mlp-128x3"].build(), torch.zeros(1, 3, 32, 32), None
        ).param_groups[0]["lr"]
    )
    with pytest.raises(ValueError, match="there is no method"):
        parse("lion")


def test_constants_are_set_while_a_job_runs(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(pathsgd.errors, "SHARE", 0.25, raising=False)
    monkeypatch.setattr(pathsgd.geometry, "SHARE", pathsgd.errors.SHARE, raising=False)  # as by from-import
    monkeypatch.setattr(pathsgd.optim, "SHARE", "its own", raising=False)
    method = "sgd:set=pathsgd.errors.SHARE=(0.9,1),nesterov=true,set=pathsgd.PathMuon.default_lr=7"
    assert parse(method)[1]["set"] == {"pathsgd.errors.SHARE": (0.9, 1), "pathsgd.PathMuon.default_lr": 7}
    assert label(method) == "SGD, momentum (nesterov=True, SHARE=(0.9, 1), default_lr=7)"
    seen, usual = [], methods.METHODS["sgd"]

    def make(*arguments, **options):
        holders = pathsgd.errors, pathsgd.geometry, pathsgd.optim
        seen.append([*(holder.SHARE for holder in holders), pathsgd.PathMuon.default_lr, options])
        return usual(*arguments, **options)

    monkeypatch.setitem(methods.METHODS, "sgd", make)
    job, before = Job("digits-rnn", method, 1e-3, epochs=1), pathsgd.PathMuon.default_lr
    assert "failure" not in run_job(job, tmp_path, "cpu")
    assert seen == [[(0.9, 1), (0.9, 1), "its own", 7, {"nesterov": True, "lr": 1e-3}]]
    run_job(replace(job, method=method + ",spin=1"), tmp_path, "cpu")
    now = pathsgd.errors.SHARE, pathsgd.geometry.SHARE, pathsgd.PathMuon.default_lr
    assert now == (0.25, 0.25, before)
    with (
        pytest.raises(AttributeError),
        constants_set("sgd:set=pathsgd.errors.SHARE=1,set=pathsgd.errors.NO=1"),
    ):
        pass
    assert pathsgd.errors.SHARE == 0.25


@pytest.mark.parametrize(
    ("network", "left_out"),
    [
        ("gpt-48", {"tokens.weight", "positions", "head.weight"}),
        ("encoder-128", {"tokens.weight", "positions", "head.weight"}),
        ("digits-rnn", {"head.weight"}),
        ("digits-vit", {"positions", "head.weight"}),
        ("vgg-16", {"16.weight"}),
    ],
)
def test_muon_takes_hidden_matrices(network, left_out):
    model = NETWORKS[network].build()
    taken = {id(p) for p in hidden_matrices(model)}
    assert {n for n, p in model.named_parameters() if p.dim() > 1 and id(p) not in taken} == left_out
    assert all(p.dim() > 1 for p in hidden_matrices(model))


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


@pytest.mark.parametrize("shape", [(2, 6, 20), (1, 20, 6)])
def test_orthogonalised_matrices_have_singular_values_of_about_one(shape):
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


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
    jobs = planned("seeds", methods=["adamw", "muon", "path-muon"], starts=["unbalanced"])
    assert {(job.method, job.lr) for job in jobs} == {
        ("adamw", 1e-2), ("muon:adamw_lr=0.01", 3e-2), ("path-muon", None),
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
        ("path-muon", None): relative, ("balanced-muon", None): relative,
        ("adamw", 1e-2): plain, ("muon:adamw_lr=0.01", 3e-2): plain,
    }  # fmt: skip


def test_variants_are_planned_if_their_constants_are_there(monkeypatch, capsys):
    names = {"faster": "set=pathsgd.PathMuon.default_lr=1", "gone": "set=pathsgd.nowhere.SHARE=1", "p": "p=1"}
    monkeypatch.setattr(ablations, "VARIANTS", names)
    jobs = planned("ablations")
    methods = ["", ":set=pathsgd.PathMuon.default_lr=1", ":p=1"]
    assert [job.method for job in jobs[::2]] == [f"balanced-muon{options}" for options in methods]
    assert [job.seed for job in jobs] == [0, 1] * 3
    assert {(job.start, job.lr) for job in jobs} == {("balanced", None)}
    assert "left out: gone" in capsys.readouterr().err


def test_relative_methods_are_planned_around_their_default(monkeypatch, capsys):
    monkeypatch.delattr(pathsgd, "PathMuon", raising=False)
    jobs = planned("path-rates", methods=["path-adam", "path-muon"])
    default = default_rate("path-adam")
    rates = [default if job.lr is None else job.lr for job in jobs]
    assert rates == pytest.approx([default * 10 ** (k / 2) for k in (-2, -1, 0, 1, 2)], rel=1e-2)
    assert "left out: path-muon" in capsys.readouterr().err


def test_mean_and_spread_of_seeds():
    assert Cell((1.0, 3.0), None, 0.1, "sgd").mean == 2
    assert Cell((1.0, 3.0), None, 0.1, "sgd").spread == pytest.approx(2**0.5)
    assert math.isinf(Cell((1.0, None), None, 0.1, "sgd").mean)
    (cell,) = cells_of([record("vgg-16", "sgd", 0.1, v, seed=s) for s, v in ((1, 3.0), (0, 1.0))])[
        "vgg-16", label("sgd"), "balanced", 5
    ]
    assert cell.values == (1.0, 3.0)


def test_tables_say_who_is_ahead_and_where_not():
    text = render(RATES)
    assert "| VGG, 16 channels | 27.0 (0.03) | 25.0 (0.01) | 21.0 (0.03) | **20.0** |" in text
    assert "best-tuned SGD, AdamW and Muon: 1 of 1 networks." in text
    assert (
        "| VGG, 16 channels | 0.03 | 0.01 | 0.004, edge of the grid |" in text
    )  # Muon was not run at three rates
    behind = [record("vgg-16", "path-muon", None, 22.0, seed=s, rate=0.04) for s in range(3)]
    assert "0 of 1 networks. Not: VGG, 16 channels 22.0 against 21.0." in render(RATES[:-1] + behind)
    moved = [
        record("vgg-16", "path-muon", None, v, "unbalanced", s, rate=0.04) for s, v in enumerate((30.0, 31.0))
    ]
    assert "Not: VGG, 16 channels 22.0 and 30.5." in render(RATES[:-1] + behind + moved)


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
    assert (
        "| VGG, 16 channels | 20.0 ± 1.0 | 20.0 ± 1.0 | 21.5 ± 1.0 | 18.00 ± 1.00 | 25.0 ± 1.0 (0.1) |"
        in text
    )
    assert "| VGG, 16 channels | yes (+1.5; -2.0) | no (+3.5) | no (+inf) |" in text
    assert "| yes | 1 of 1 | 0 of 1 | 0 of 1 |" in text
    worse = seeds("balanced-muon", (23.0, 24.0, 25.0), "unbalanced")
    assert "| no (+1.5; +4.0) | " in summary.summarize(runs[:9] + worse + runs[12:])
    assert "runs failed" not in text
    assert "1 of 25 runs failed" in summary.summarize([*runs, {**runs[0], "seed": 9, "failure": "Oh"}])


def test_ablations_are_compared_over_the_same_seeds(monkeypatch):
    monkeypatch.setattr(ablations, "VARIANTS", {"no share": "set=pathsgd.errors.SHARE=0"})
    changed = "balanced-muon:set=pathsgd.errors.SHARE="
    runs = [
        *seeds("balanced-muon", (10.0, 10.0, 40.0)), *seeds(changed + "0", (11.0, 12.0)),
        *seeds("balanced-muon", (2.0, 2.0), network="gpt-48"),
        *seeds(changed + "0", (1.9, 1.9), network="gpt-48"),
        *seeds(changed + "1", (5.0, None)),
    ]  # fmt: skip
    text = summary.summarize(runs)
    assert "| no share | +15.0 | -5.0 | +5.0 |" in text
    assert "| BalancedMuon (SHARE=1) | diverges |  | diverges |" in text


def test_the_commands_write_table_and_figure(tmp_path, capsys):
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RATES))
    jobs = tmp_path / "jobs.json"
    arguments = [
        "plan",
        "seeds",
        str(jobs),
        "--records",
        str(tmp_path),
        "--networks",
        "vgg-16",
        "--methods",
        "adamw",
    ]
    assert command.main(arguments) == 0
    assert f"{jobs}: 5 jobs" in capsys.readouterr().out
    assert len(json.loads(jobs.read_text())) == 5
    assert command.main(["plan", "rates", str(jobs), "--records", str(tmp_path), "--epochs", "30"]) == 0
    assert {job["network"] for job in json.loads(jobs.read_text())} == set(plan.LONG)
    assert (
        command.main(["plan", "balance", str(jobs), "--records", str(tmp_path), "--networks", "vgg-16"]) == 0
    )
    assert len(read_jobs(jobs)) == 36  # what was recorded before is run again
    assert command.main(["summary", str(tmp_path)]) == 0
    assert "## 5 epochs: results" in capsys.readouterr().out
    assert command.main(["table", str(tmp_path), "--into", str(tmp_path)]) == 0
    assert command.main(["figure", str(tmp_path), "--into", str(tmp_path)]) == 0
    assert (tmp_path / "table.md").read_text().startswith("# One learning rate")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
