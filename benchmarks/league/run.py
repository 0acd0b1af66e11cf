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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .networks import NETWORKS
from .records import FILE, job_of, read_records
from .train import Job, OutOfTime, Record, run_job

RECORDED = 2  # the exit status of a process whose job failed in a way that it cannot go on
GRACE = 20  # seconds that a job may go on after the end of the time


def run_jobs(
    plan: Callable[[dict[Job, Record]], list[Job]],
    out: Path,
    folder: Path,
    *,
    known: Sequence[Path] = (),
    workers: int = 1,
    seconds: float = math.inf,
    device: str | None = None,
) -> int:
    """Runs what is planned and not recorded yet, and appends to the records in ``out``.

    Args:
        plan: the jobs, from what is recorded so far; asked again after every job.
        out: a folder.
        folder: of the data.
        known: where other records are.
        workers: processes.
        seconds: after which no job is begun, and those that run are given up.
        device: "cuda" if there is one.

    Returns:
        How many jobs were run.
    """
    deadline = time.monotonic() + seconds
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    records = read_records([*known, out])
    begun = set(records)

    def find_new() -> list[Job]:
        new = [job for job in dict.fromkeys(plan(records)) if job not in begun]
        begun.update(new)
        return sorted(new, key=estimate_cost, reverse=True)

    began, count = time.monotonic(), 0
    run = _in_this_process if workers == 1 else _in_processes
    with (out / FILE).open("a") as file:
        for record in run(find_new, workers, (folder, device, deadline)):
            records[job_of(record)] = record
            print(json.dumps(record), file=file, flush=True)
            count += 1
            print(_line(record, count, time.monotonic() - began), flush=True)
    print(f"{count} jobs in {time.monotonic() - began:.0f} s", flush=True)
    return count


def estimate_cost(job: Job) -> float:
    """Seconds, roughly."""
    return NETWORKS[job.network].cost * job.length * max(1, job.batch)


def _line(record: Record, count: int, seconds: float) -> str:
    result = record.get("failure") or f"valid {record['valid']} test {record['test']}"
    extra = "".join(
        f" {name} {record[name]}" for name, usual in (("length", 1), ("batch", 1), ("start", "usual"))
        if record[name] != usual
    )  # fmt: skip
    what = f"{record['network']} {record['method']} seed {record['seed']}{extra}"
    return f"{seconds:5.0f} s {count:4} {what}: {result} ({record['seconds']:.0f} s)"


Find = Callable[[], list[Job]]


def _in_this_process(find_new: Find, workers: int, arguments: tuple[Any, ...]) -> Iterator[Record]:
    folder, device, deadline = arguments
    _prepare(device)
    waiting = find_new()
    while waiting and time.monotonic() < deadline:
        try:
            yield run_job(waiting.pop(0), folder, device, deadline)
        except OutOfTime:
            return
        waiting += find_new()


def _prepare(device: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch.export's, once for every network
    torch.backends.mha.set_fastpath_enabled(False)  # validate what was trained
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True


def _in_processes(find_new: Find, workers: int, arguments: tuple[Any, ...]) -> Iterator[Record]:
    """A process that dies (a GPU error stays with it) is replaced; its job is lost."""
    context = multiprocessing.get_context("spawn")
    waiting: Any = context.Queue()
    done: Any = context.Queue()
    deadline, spare, left = arguments[-1], 4 * workers, 0

    def start() -> Any:
        process = context.Process(target=_work, args=(waiting, done, arguments), daemon=True)
        process.start()
        return process

    def add_new() -> int:
        new = find_new()
        for job in new:
            waiting.put(job)
        return len(new)

    with _mps(arguments[1]):
        running = [start() for _ in range(workers)]
        left = add_new()
        while left and running and time.monotonic() < deadline + GRACE:
            try:
                yield done.get(timeout=0.5)
                left += add_new() - 1
                continue
            except queue.Empty:
                pass
            for process in [p for p in running if not p.is_alive()]:
                running.remove(process)
                left -= process.exitcode not in (0, RECORDED)
                if process.exitcode and spare and time.monotonic() < deadline:
                    spare -= 1
                    running.append(start())
        for process in running:
            process.kill()
        while not done.empty():  # what the last of them wrote before it ended
            yield done.get()
    waiting.cancel_join_thread()


def _work(waiting: Any, done: Any, arguments: tuple[Any, ...]) -> None:
    folder, device, deadline = arguments
    _prepare(device)
    while time.monotonic() < deadline:
        try:
            record = run_job(waiting.get(), folder, device, deadline)
        except OutOfTime:
            break
        done.put(record)
        if "CUDA" in record.get("failure", "") and "out of memory" not in record["failure"]:
            done.close()
            done.join_thread()
            sys.exit(RECORDED)


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
