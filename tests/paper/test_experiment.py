"""Runs: what they record, how they end, and that an interruption changes no number."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch

from pathsgd.console.files import write_atomically
from pathsgd.errors import PathError
from pathsgd.paper.api import report_out_of_memory
from pathsgd.paper.config import Run, Seeds
from pathsgd.paper.data.load import load
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.records.checksum import checksum_dataset
from pathsgd.paper.records.folder_lock import lock_folder
from pathsgd.paper.records.json_files import encode_line, write_json
from pathsgd.paper.records.manifest import add_manifest, read_manifests
from pathsgd.paper.records.run_folder import RunFolder, RunRecord
from pathsgd.paper.step_size_search import choose_winner, find_resumable
from pathsgd.paper.training.dropout import drop_units
from pathsgd.paper.training.fused_adagrad import FusedAdagrad
from pathsgd.paper.training.initial_network import make_initial_network
from pathsgd.paper.training.lanes import choose_lanes
from pathsgd.paper.training.run_loop import Checkpoints, train_run
from pathsgd.paper.training.trainer import Trainer
from pathsgd.paper.training.training_data import prepare_data

CPU = torch.device("cpu")
SMALL = Run(hidden=(12, 12), epochs=3, step_size=0.1)
EVERY_EPOCH = Checkpoints(seconds=0.0)


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture(scope="module")
def problem(digits):
    return prepare_data(digits, SMALL, CPU)


class Killed(BaseException):
    """What a test ends a run with: nothing in a run catches it."""


def run(config, problem, folder, kill_at=None, checkpoints=EVERY_EPOCH):
    seen = []

    def watch(run, line):
        seen.append(line)
        if kill_at is not None and line["epoch"] == kill_at:
            raise Killed

    return train_run(config, problem, folder, watch, checkpoints), seen


@pytest.mark.parametrize("method", [name for name in METHODS if name != "muon"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_interrupted_run_ends_with_the_same_bits(problem, tmp_path, method, dropout):
    config = dataclasses.replace(SMALL, method=method, dropout=dropout, step_size=0.01)
    expected, _ = run(config, problem, tmp_path / "whole")
    for epoch in (1, 2):
        with pytest.raises(Killed):
            run(config, problem, tmp_path / "cut", kill_at=epoch)
        half = RunFolder(tmp_path / "cut", config).metrics
        half.write_bytes(half.read_bytes() + b'{"epoch": 9, "train_lo')  # as a kill in mid-write leaves it
    found, seen = run(config, problem, tmp_path / "cut")
    assert seen[0]["epoch"] == 0
    assert len(seen) == 4
    assert found.lines == expected.lines
    whole, cut = (RunFolder(tmp_path / name, config).metrics.read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_every_way_runs_were_trained_is_noted_once(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    for _ in range(2):
        add_manifest(path, CPU)
    assert len(read_manifests(path)) == 1
    monkeypatch.setattr("pathsgd.paper.records.manifest._revision", lambda: "another")
    add_manifest(path, CPU)
    assert [one["revision"] == "another" for one in read_manifests(path)] == [False, True]
    for damaged, said in (('{"revision": null}', "expected a list"), ('[{"x": NaN}]', "NaN is not JSON")):
        path.write_text(damaged)
        with pytest.raises(PathError, match=said):
            add_manifest(path, CPU)
    assert read_manifests(tmp_path / "never noted") == []


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: out of memory"])
def test_a_gpu_without_memory_is_one_line(text):
    for kind in (torch.OutOfMemoryError, RuntimeError):
        with pytest.raises(PathError, match=f"out of memory: {text}"), report_out_of_memory():
            raise kind(text)
    with pytest.raises(RuntimeError, match="illegal"), report_out_of_memory():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_small_networks_share_a_gpu_and_large_ones_do_not(monkeypatch):
    monkeypatch.setattr("pathsgd.paper.training.lanes._memory_bytes", lambda device: 80e9)
    gpu = torch.device("cuda")
    assert choose_lanes(gpu, 30_000_000, None, ["sgd"]) == 3
    assert choose_lanes(gpu, 3_000_000_000, None, ["sgd"]) == 1
    assert choose_lanes(gpu, 3_000_000_000, 2, ["sgd"]) == 2
    assert choose_lanes(gpu, 1_000, None, ["sgd"], alone=True) == 1
    with pytest.raises(PathError, match="Invalid number of lanes: 17"):
        choose_lanes(gpu, 1_000, 17, ["sgd"])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # on CPUs without bf16
def test_an_interrupted_run_of_muon_ends_with_the_same_bits(problem, tmp_path):
    """torch's products round otherwise after its first one, unless that was made before the first run."""
    enabled = torch._C._get_mkldnn_enabled()
    choose_lanes(CPU, 10, 1, ["sgd", "muon"])
    config = dataclasses.replace(SMALL, method="muon", step_size=0.01)
    expected, _ = run(config, problem, tmp_path / "whole")
    with pytest.raises(Killed):
        run(config, problem, tmp_path / "cut", kill_at=2)
    assert run(config, problem, tmp_path / "cut")[0] == expected
    torch._C._set_mkldnn_enabled(enabled)


def test_without_the_state_of_the_order_an_interrupted_run_would_differ(problem, tmp_path, monkeypatch):
    expected, _ = run(SMALL, problem, tmp_path / "whole")
    load = Trainer.load_state_dict

    def forgetful(self, state):
        load(self, {**state, "order": torch.Generator().manual_seed(7).get_state()})

    monkeypatch.setattr(Trainer, "load_state_dict", forgetful)
    with pytest.raises(Killed):
        run(SMALL, problem, tmp_path / "cut", kill_at=2)
    assert RunFolder(tmp_path / "cut", SMALL).load() is not None
    found, _ = run(SMALL, problem, tmp_path / "cut")
    assert found.lines[:2] == expected.lines[:2]
    assert found.lines != expected.lines


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # torch's Muon, on CPUs without bf16
def test_muon_and_convolutions_and_other_norms(digits, tmp_path):
    for changes in (
        {"method": "muon", "step_size": 1e-3},
        {"net": "conv", "hidden": (4, 6, 16), "method": "path-sgd", "step_size": 1.0},
        {"net": "conv", "hidden": (4, 6, 16), "method": "path-adam", "step_size": 1e-3, "dropout": 0.5},
        {"p": 1.0, "hidden": (12, 12, 12), "step_size": 10.0},
        {"centre": False, "batch": 37},
    ):
        config = dataclasses.replace(SMALL, **changes)
        found, _ = run(config, prepare_data(digits, config, CPU), tmp_path)
        losses = found.curve("train_loss")
        assert found.status == "done"
        assert losses[-1] < losses[1], changes  # of the first epoch, with dropout as in the last


def test_seeds_are_apart_from_each_other(problem):
    def weights(**seeds):
        model, _ = make_initial_network(
            dataclasses.replace(SMALL, init="unbalanced", seed=Seeds(**seeds)), problem
        )
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def points(**seeds):
        training = Trainer(dataclasses.replace(SMALL, dropout=0.5, seed=Seeds(**seeds)), problem)
        training.train_epoch()
        return training.order_generator.get_state(), training.dropout_generator.get_state()

    assert torch.equal(weights(), weights(order=1, dropout=1, split=1))
    assert not torch.equal(weights(), weights(init=1))
    assert not torch.equal(weights(), weights(rescaling=1))
    assert torch.equal(points()[0], points(init=1, dropout=1)[0])
    assert not torch.equal(points()[0], points(order=1)[0])
    assert not torch.equal(points()[1], points(dropout=1)[1])


def test_dropout_drops_and_scales_forward_and_backward_by_its_own_generator():
    x = torch.rand(100, 200) + 1
    x.requires_grad_()
    before = torch.get_rng_state()
    dropped_x = drop_units(x, 0.2, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)
    kept = dropped_x != 0
    assert abs(kept.float().mean().item() - 0.8) < 0.01
    torch.testing.assert_close(dropped_x[kept], x[kept] / 0.8)
    dropped_x.sum().backward()
    torch.testing.assert_close(x.grad, kept / 0.8)


def test_the_unbalanced_network_is_the_same_function(problem):
    models = [make_initial_network(dataclasses.replace(SMALL, init=i), problem)[0] for i in
              ("balanced", "unbalanced", "powers-of-two")]  # fmt: skip
    outputs = [model(problem.train_x[:50]) for model in models]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(models[0][0].weight, models[2][0].weight)


def test_validation_points_are_kept_out(digits):
    split = prepare_data(digits, dataclasses.replace(SMALL, validation=300, centre=False), CPU)
    whole = prepare_data(digits, dataclasses.replace(SMALL, centre=False), CPU)
    assert (len(split.train_y), len(split.evaluated_y)) == (1142, 300)
    both = torch.cat([split.train_x, split.evaluated_x])
    assert torch.equal(both.sum(0), whole.train_x.sum(0))
    centred = prepare_data(digits, dataclasses.replace(SMALL, validation=300), CPU)
    assert centred.train_x.mean(0).abs().max() < 1e-6
    assert centred.evaluated_x.mean(0).abs().max() > 1e-3
    with pytest.raises(PathError, match="1442 training points; 1442 cannot be kept out"):
        prepare_data(digits, dataclasses.replace(SMALL, validation=1442), CPU)
    with pytest.raises(PathError, match="less than a batch of 2000"):
        prepare_data(digits, dataclasses.replace(SMALL, batch=2000), CPU)


@pytest.mark.parametrize("method", ["sgd", "path-sgd", "adagrad", "path-momentum", "path-adam"])
def test_a_step_size_that_explodes_is_recorded_as_diverged(problem, tmp_path, method):
    config = dataclasses.replace(SMALL, method=method, step_size=1e30)
    found, _ = run(config, problem, tmp_path)
    assert found.status == "diverged"
    assert "not finite in epoch" in found.reason
    assert found.best == (1.0, 0) or found.best[0] > 0.1
    again, seen = run(config, problem, tmp_path)
    assert again == found
    assert seen == []


def test_a_run_that_learns_nothing_is_stopped_after_its_grace(problem, tmp_path):
    config = dataclasses.replace(SMALL, method="sgd", step_size=1e-9, grace=2)
    found, _ = run(config, problem, tmp_path)
    assert (found.status, found.epochs) == ("stopped", 2)
    assert "where guessing has 90.0%" in found.reason
    assert run(dataclasses.replace(config, step_size=0.1), problem, tmp_path)[0].status == "done"


def test_files_that_were_meddled_with_are_not_believed_and_run_nothing(problem, tmp_path):
    expected, _ = run(SMALL, problem, tmp_path)
    folder = RunFolder(tmp_path, SMALL)
    folder.metrics.write_bytes(folder.metrics.read_bytes().replace(b"1", b"2", 1))
    assert folder.find_record() is None
    assert run(SMALL, problem, tmp_path)[0] == expected
    folder.result.write_text("{")
    assert run(SMALL, problem, tmp_path)[0] == expected
    folder.result.unlink()
    for content in (pickle.dumps(Trap(tmp_path / "sprung")), b"", b"PK\x03\x04 broken"):
        folder.checkpoint.write_bytes(content)
        folder.result.unlink(missing_ok=True)
        assert run(SMALL, problem, tmp_path)[0] == expected
    assert not (tmp_path / "sprung").exists()


def test_a_checkpoint_is_believed_whole_and_in_its_place_or_not_at_all(problem, tmp_path):
    expected, _ = run(SMALL, problem, tmp_path / "whole")
    other = dataclasses.replace(SMALL, step_size=0.2)
    for config in (SMALL, other):
        with pytest.raises(Killed):
            run(config, problem, tmp_path, kill_at=3)
    folder = RunFolder(tmp_path, SMALL)
    content, metrics = folder.checkpoint.read_bytes(), folder.metrics.read_bytes()
    (whole, _) = folder.load()
    generator = torch.Generator().manual_seed(0)
    believed = 0
    for place in torch.randint(len(content), (40,), generator=generator).tolist():
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        folder.checkpoint.write_bytes(flipped)
        saved = folder.load()
        believed += saved is not None
        if saved is not None:  # a bit that nothing reads, such as padding
            for part in ("model", "order", "drops"):
                torch.testing.assert_close(saved[0][part], whole[part], rtol=0, atol=0)
    assert believed < 25
    folder.checkpoint.write_bytes(RunFolder(tmp_path, other).checkpoint.read_bytes())
    assert folder.load() is None
    folder.checkpoint.write_bytes(content)
    folder.metrics.write_bytes(metrics.replace(b"1", b"2", 1))
    assert folder.load() is None
    (folder.path / ".checkpoint.pt.left").write_bytes(b"half")
    assert run(SMALL, problem, tmp_path)[0] == expected
    assert {path.name for path in folder.path.iterdir()} == {"config.json", "metrics.jsonl", "result.json"}


def test_a_finished_run_is_tied_to_its_folder(problem, tmp_path):
    run(SMALL, problem, tmp_path)
    folder = RunFolder(tmp_path, SMALL)
    for name, old, new in (("config.json", "0.1", "5.0"), ("result.json", "done", "diverged")):
        path = folder.path / name
        content = path.read_text()
        assert old in content
        path.write_text(content.replace(old, new))
        assert folder.find_record() is None
        path.write_text(content)
    assert folder.find_record() is not None
    folder.path.rename(tmp_path / dataclasses.replace(SMALL, method="sgd").name)
    assert RunFolder(tmp_path, dataclasses.replace(SMALL, method="sgd")).find_record() is None


class Trap:
    """Unpickled, it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"x": float("nan")})
    assert json.loads(encode_line({"x": float("nan"), "y": 1.5})) == {"x": None, "y": 1.5}


def test_one_process_at_a_time(tmp_path):
    def second():
        with lock_folder(tmp_path / "out"):
            pass

    with lock_folder(tmp_path / "out"), pytest.raises(PathError, match="another process is at work in"):
        second()
    second()


def recorded(step_size, status="done", errors=(0.5, 0.2, 0.3)):
    config = dataclasses.replace(SMALL, step_size=step_size, validation=10)
    lines = [{"epoch": k, "validation_error": e} for k, e in enumerate((0.9, *errors))]
    return RunRecord(config, status, lines)


def test_the_winner_has_the_lowest_error_and_of_equals_the_fewest_epochs():
    slow, fast = recorded(1.0, errors=(0.5, 0.4, 0.2)), recorded(0.1, errors=(0.5, 0.2, 0.3))
    lucky = recorded(0.5, "diverged", errors=(0.5, 0.01, None))
    assert choose_winner([slow, fast, lucky]) is fast
    assert choose_winner([fast, slow]) is fast
    assert choose_winner([lucky]) is None
    equal = recorded(0.3, errors=(0.5, 0.2, 0.3))
    assert choose_winner([fast, equal]) is choose_winner([equal, fast]) is equal


def test_stopped_runs_are_carried_on_only_if_nothing_learned():
    stopped, learned = recorded(1e-9, "stopped", (0.9,)), recorded(0.1)
    hopeless, diverged = recorded(1e-3, errors=(0.9, 0.88, 0.85)), recorded(1.0, "diverged", (None,))
    assert find_resumable([stopped, learned], classes=10) == []
    assert find_resumable([stopped, hopeless], classes=10) == [stopped]
    assert find_resumable([stopped, recorded(1e-3, errors=(0.7, 0.6, 0.5))], classes=10) == [stopped]
    assert find_resumable([stopped, diverged], classes=10) == [stopped]


def test_a_run_is_known_by_everything_its_numbers_depend_on(digits):
    names = {SMALL.name}
    for changes in ({"step_size": 0.2}, {"p": 1.0}, {"seed": Seeds(order=1)}, {"data": "x"}, {"epochs": 4}):
        names.add(dataclasses.replace(SMALL, **changes).name)
    assert len(names) == 6
    assert "/" not in dataclasses.replace(SMALL, dataset="a/b=../c.npz").name
    other = dataclasses.replace(digits, train_y=digits.train_y.flip(0))
    assert checksum_dataset(digits) == checksum_dataset(load("digits")) != checksum_dataset(other)
    for wrong in ({"step_size": 0.0}, {"step_size": float("nan")}, {"dropout": 1.0}, {"hidden": ()},
                  {"batch": 0}, {"epochs": 0}, {"validation": -1}, {"p": 0.5}, {"grace": -1},
                  {"p": float("inf")}, {"seed": Seeds(order=1 << 63)}, {"step_size": 1e300}):  # fmt: skip
        with pytest.raises(PathError, match="Invalid"):
            dataclasses.replace(SMALL, **wrong)


def test_adagrad_in_one_pass_is_torchs():
    """By Triton's interpreter, as the other kernels."""
    models = [make_initial_network(SMALL, prepare_data(load("digits"), SMALL, CPU))[0] for _ in range(2)]
    kinds = torch.optim.Adagrad, FusedAdagrad
    optimizers = [kind(m.parameters(), lr=0.1) for kind, m in zip(kinds, models, strict=True)]
    for step in range(5):
        torch.manual_seed(step)
        grads = [torch.randn_like(p) for p in models[0].parameters()]
        for model, optimizer in zip(models, optimizers, strict=True):
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad
            optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert (p - q).abs().max() < 1e-6
        assert torch.allclose(optimizers[0].state[p]["sum"], optimizers[1].state[q]["sum"])
        assert optimizers[1].state[q]["step"] == 5
    assert optimizers[1].state_dict()["state"].keys() == optimizers[0].state_dict()["state"].keys()
