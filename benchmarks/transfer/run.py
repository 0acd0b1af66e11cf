"""Many jobs on one machine: processes that share a GPU take them from one queue, the longest first."""

from __future__ import annotations

import json
import math
import multiprocessing
import queue
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .methods import needs_paths
from .networks import NETWORKS
from .records import FILE, read_records, without_recorded
from .train import Job, OutOfTime, Record, run_job

GRACE = 20  # seconds that an epoch may go on after the end of the time


def run_jobs(
    jobs: Iterable[Job],
    out: Path,
    folder: Path,
    *,
    workers: int = 1,
    seconds: float = math.inf,
    steps: int | None = None,
    device: str | None = None,
    in_order: bool = False,
) -> int:
    """Runs what is not recorded in ``out`` yet and appends to its records.

    Args:
        jobs: what to run.
        out: a folder.
        folder: where CIFAR-10 is.
        workers: processes.
        seconds: after which no job is begun, and those that run are given up at their next epoch.
        steps: at most so many an epoch, to try things out.
        device: "cuda" if there is one.
        in_order: as they come; by default the longest first.

    Returns:
        How many jobs are left.
    """
    deadline = time.monotonic() + seconds
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    left = without_recorded(jobs, read_records([out]))
    if not in_order:
        left.sort(key=estimate_cost, reverse=True)
    began, count = time.monotonic(), len(left)
    print(f"{count} jobs on {device}, {workers} at a time", flush=True)
    arguments = (folder, device, steps, deadline)
    done = _in_this_process(left, arguments) if workers == 1 else _in_processes(left, arguments, workers)
    finished = 0
    with (out / FILE).open("a") as file:
        for record in done:
            print(json.dumps(record), file=file, flush=True)
            finished += 1
            print(_line(record, finished, count, time.monotonic() - began), flush=True)
    print(f"{finished} of {count} jobs in {time.monotonic() - began:.0f} s", flush=True)
    return count - finished


def estimate_cost(job: Job) -> float:
    """Seconds, roughly."""
    return NETWORKS[job.network].cost * job.epochs / 5 * (2 if needs_paths(job.method) else 1)


def _line(record: Record, finished: int, count: int, seconds: float) -> str:
    lr = "default" if record["lr"] is None else f"{record['lr']:g}"
    result = record.get("failure") or (
        "diverged" if record["diverged"] else f"{record['metric']} {record['value']}"
    )
    what = f"{record['network']} {record['method']} {lr} {record['start']} seed {record['seed']}"
    return f"{seconds:5.0f} s {finished:4}/{count} {what}: {result} ({record['seconds']:.0f} s)"


def _in_this_process(jobs: list[Job], arguments: tuple[Any, ...]) -> Iterator[Record]:
    folder, device, steps, deadline = arguments
    _prepare(device)
    for job in jobs:
        if time.monotonic() > deadline:
            return
        try:
            yield run_job(job, folder, device, steps=steps, deadline=deadline)
        except OutOfTime:
            return


def _prepare(device: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch.export's, once for every network
    torch.backends.mha.set_fastpath_enabled(False)  # validate what was trained
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True


def _in_processes(jobs: list[Job], arguments: tuple[Any, ...], workers: int) -> Iterator[Record]:
    """A process that dies (a GPU error stays with it) is replaced; its job is lost."""
    context = multiprocessing.get_context("spawn")
    waiting: Any = context.Queue()
    done: Any = context.Queue()
    deadline, spare = arguments[-1], 4 * workers
    for job in [*jobs, *[None] * (workers + spare)]:
        waiting.put(job)

    def start() -> Any:
        process = context.Process(target=_work, args=(waiting, done, arguments), daemon=True)
        process.start()
        return process

    with _mps(arguments[1]):
        running = [start() for _ in range(workers)]
        while running:
            try:
                yield done.get(timeout=0.5)
                continue
            except queue.Empty:
                pass
            for process in [p for p in running if not p.is_alive()]:
                running.remove(process)
                if process.exitcode and spare and time.monotonic() < deadline:
                    spare -= 1
                    running.append(start())
            if time.monotonic() > deadline + GRACE:
                for process in running:
                    process.kill()
        while not done.empty():  # what the last of them wrote before it ended
            yield done.get()
    waiting.cancel_join_thread()


def _work(waiting: Any, done: Any, arguments: tuple[Any, ...]) -> None:
    folder, device, steps, deadline = arguments
    _prepare(device)
    while time.monotonic() < deadline and (job := waiting.get()) is not None:
        try:
            record = run_job(job, folder, device, steps=steps, deadline=deadline)
        except OutOfTime:
            break
        done.put(record)
        if "CUDA" in record.get("failure", "") and "out of memory" not in record["failure"]:
            done.close()
            done.join_thread()
            sys.exit(1)


@contextmanager
def _mps(device: str) -> Iterator[None]:
    """Lets the kernels of several processes run at the same time, by NVIDIA's service for it. Where that
    does not work they take turns."""
    control = shutil.which("nvidia-cuda-mps-control") if device == "cuda" else None
    started = control is not None and subprocess.run([control, "-d"], capture_output=True).returncode == 0

    def stop() -> None:
        subprocess.run([str(control)], input=b"quit\n", capture_output=True)

    if started:
        probe = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').sum().item()"]
        if subprocess.run(probe, capture_output=True).returncode:
            stop()
            started = False
    if device == "cuda":
        print("the processes share the GPU" if started else "the processes take turns on the GPU", flush=True)
    try:
        yield
    finally:
        if started:
            stop()
