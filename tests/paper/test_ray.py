"""Studies on a real Ray cluster of this machine: the same bytes as without, also when processes are killed.

Ray starts in seconds, so the tests share a cluster and its workers.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time

import pytest
import ray
import torch

from pathsgd import PathError, cli
from pathsgd.paper import Progress, Run, Study, StudySetup, reproduce, sweep
from pathsgd.paper.executors import ray as ray_executor
from pathsgd.paper.executors.ray import MOST_LOSSES, RayExecutor, _count_loss, _Task
from pathsgd.paper.records.folder_lock import lock_folder
from pathsgd.paper.records.json_files import read_lines
from pathsgd.paper.records.manifest import make_manifest
from pathsgd.paper.records.recorder import Recorder
from pathsgd.paper.records.run_folder import RunFolder
from pathsgd.paper.training.lanes import SMALL
from support import ray_driver
from support.brief_timing import make_brief_measurement
from support.ray_driver import read_log, watch_tasks

STUDY = Study(
    methods=("sgd", "path-momentum"), inits=("unbalanced",), dropouts=(0.5,), step_sizes=(0.1, 0.01),
    hidden=(12, 12), search_epochs=8, epochs=3, validation=300,
)  # fmt: skip
SWEEP = [
    "sweep", "--methods", "sgd", "path-momentum", "--inits", "unbalanced", "--dropouts", "0.5",
    "--step-sizes", "0.1", "0.01", "--hidden", "12", "12", "--search-epochs", "8", "--validation", "300",
    "--checkpoint-seconds", "0", "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Its address. Two CPUs, whatever the machine has."""
    # pytest's processes may share these tests: of two clusters that start at once, one may find the other's
    # port, which refuses its token.
    starting = tmp_path_factory.getbasetemp().parent / "ray"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))  # or Ray writes one into the home folder
        with lock_folder(starting, wait=True):
            ray.init(
                num_cpus=2, num_gpus=0, object_store_memory=100 << 20, include_dashboard=False,
                log_to_driver=False, logging_level="ERROR",
            )  # fmt: skip
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The study without Ray."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("local")
    reproduce(STUDY, out, StudySetup(device="cpu"), figures=False)
    return recorded(out)


def recorded(out):
    """All that may not depend on where runs were trained, or on what was killed."""
    names = ("study.json", "data.json", "choices.json")
    found = {name: (out / name).read_bytes() for name in names if (out / name).exists()}
    for path in sorted((out / "runs").rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.name == "result.json":
                content = {k: v for k, v in json.loads(content).items() if k != "seconds"}
            found[str(path.relative_to(out))] = content
    return found


def assert_same_search(out, local):
    found = recorded(out)
    assert len([name for name in found if name.endswith("metrics.jsonl")]) >= 4
    assert {name: local[name] for name in found if name != "study.json"} == {
        name: content for name, content in found.items() if name != "study.json"
    }


def count_kept_epochs(folder):
    """Those that are not trained again."""
    if (folder / "result.json").exists():
        return len(read_lines(folder / "metrics.jsonl")) - 1
    checkpoint = folder / "checkpoint.pt"
    return torch.load(checkpoint)["epoch"] if checkpoint.exists() else 0


def test_a_study_ends_in_the_same_bytes(cluster, local, tmp_path, monkeypatch):
    monkeypatch.setattr("pathsgd.paper.api.measure_step_cost", make_brief_measurement())
    results = reproduce(STUDY, tmp_path, StudySetup(executor="ray"), figures=False)
    assert recorded(tmp_path) == local
    assert results.cost is not None
    (manifest,) = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["device"], manifest["threads"]) == ("CPU", 1)


def test_a_killed_worker_loses_no_recorded_epoch(cluster, local, tmp_path, monkeypatch):
    """Checkpoints come every few epochs: epochs are recorded with them, and no other is."""
    log, out = tmp_path / "log", tmp_path / "out"
    monkeypatch.setattr(ray_executor, "train_task", watch_tasks(log, pause=0.1))
    killed, messages = {}, []

    class KillWorker(Progress):
        def epoch(self, run, metrics):
            folder = out / "runs" / run.name
            if not killed and 0 < count_kept_epochs(folder) < metrics["epoch"]:
                (pid,) = {trained.pid for trained in read_log(log) if trained.run == run.name}
                os.kill(pid, signal.SIGKILL)
                killed.update(run=run.name, pid=pid, epochs=len(read_lines(folder / "metrics.jsonl")) - 1)

        def message(self, text):
            messages.append(text)

    sweep(STUDY, out, StudySetup(executor="ray", checkpoint_seconds=0.25), progress=KillWorker())
    mine = [trained for trained in read_log(log) if trained.run == killed["run"]]
    later = [trained.epoch for trained in mine if trained.pid != killed["pid"]]
    assert later == list(range(later[0], STUDY.search_epochs + 1))
    assert later[0] > killed["epochs"] > 0
    assert f"the worker of {killed['run']} died and is replaced" in messages[0]
    assert_same_search(out, local)


def test_a_killed_driver_goes_on_from_what_it_recorded(cluster, local, tmp_path, monkeypatch):
    log, out = tmp_path / "log", tmp_path / "out"
    command = [*SWEEP, "--out", str(out), "--executor", "ray", "--address", cluster]
    driver = subprocess.Popen([sys.executable, ray_driver.__file__, str(log), *command])
    deadline = time.monotonic() + 240  # torch and Ray are imported by five processes first
    while not any(trained.epoch == 4 for trained in read_log(log)):
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    kept = {folder.name: count_kept_epochs(folder) for folder in (out / "runs").iterdir()}
    assert max(kept.values()) >= 2
    again = tmp_path / "again"
    monkeypatch.setattr(ray_executor, "train_task", watch_tasks(again, pause=0.0))
    assert cli.main(command) == 0
    assert [t for t in read_log(again) if t.epoch <= kept.get(t.run, 0)] == []
    assert_same_search(out, local)


MULTIPLY = """
import hashlib, torch
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(100, 1100, generator=generator), torch.randn(1100, 900, generator=generator)
found = f"{torch.get_num_threads()} {hashlib.sha256(str((x @ y).tolist()).encode()).hexdigest()}"
"""


def test_threads_of_a_large_network_are_those_of_a_local_run(cluster, monkeypatch):
    """And products have its bits: Ray gives a task one thread, of which a BLAS makes no more."""

    def run_code(code):
        scope = {}
        exec(code, scope)
        return scope["found"]

    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    local = subprocess.check_output([sys.executable, "-c", f"{MULTIPLY}print(found)"], text=True).strip()
    executor = RayExecutor({}, None, SMALL, ["sgd"], None, alone=False)
    assert executor.call(run_code, MULTIPLY) == local
    assert local.startswith("2 ")
    assert executor.resources == {"num_cpus": 2}


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("nonsense", "Invalid address of a Ray cluster: 'nonsense'"),
        ("ray://127.0.0.1:10001", "is Ray Client's: start the command on a node"),
    ],
)
def test_an_address_that_cannot_be_reached_is_one_line(tmp_path, capsys, monkeypatch, address, message):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    command = [*SWEEP, "--out", str(tmp_path / "out"), "--executor", "ray", "--address", address]
    assert cli.main(command) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_whose_workers_always_die_is_given_up(tmp_path):
    task = _Task(Recorder(RunFolder(tmp_path, Run()), Progress().epoch, keep_checkpoint=False))
    for _ in range(MOST_LOSSES - 1):
        _count_loss(task, RuntimeError("gone"), Progress())
    with pytest.raises(PathError, match=r"the worker of digits-.* died 5 times in a row: gone"):
        _count_loss(task, RuntimeError("gone"), Progress())


def test_errors_of_workers_and_options(cluster, tmp_path, monkeypatch):
    with pytest.raises(PathError, match=r"a network of .* needs .* GB or more"):
        RayExecutor({}, None, 10**15, ["sgd"], None, alone=False)
    with pytest.raises(PathError, match="the Ray cluster has no GPU"):
        sweep(STUDY, tmp_path, StudySetup(executor="ray", device="cuda"))
    with pytest.raises(PathError, match="--address is for --executor ray"):
        StudySetup(address=cluster)
    with pytest.raises(PathError, match="already, not elsewhere:6379"):
        sweep(STUDY, tmp_path, StudySetup(executor="ray", address="elsewhere:6379"))
    changed = {**make_manifest(torch.device("cpu")), "source": "another"}
    monkeypatch.setattr(ray_executor, "make_manifest", lambda device: changed)
    with pytest.raises(PathError, match="has another version of pathsgd"):
        sweep(STUDY, tmp_path, StudySetup(executor="ray"))


def test_a_missing_ray_names_the_extra(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pathsgd.paper.executors.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PathError, match=r"--executor ray needs Ray: pip install 'pathsgd\[ray\]'"):
        sweep(STUDY, tmp_path / "out", StudySetup(executor="ray"))
    assert not (tmp_path / "out").exists()
