"""An epoch of the paper's network with evaluation, for each method: ``python benchmarks/epoch.py``.

Also how many runs a GPU takes together faster than one after another (lanes).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pathsgd.console.devices import device_name
from study.config import Run
from study.data import Dataset
from study.methods import METHODS
from study.sources import load
from study.training import Trainer, prepare_data, use_own_streams


def like_cifar() -> Dataset:
    """Noise in the shape of CIFAR-10: times do not depend on the numbers."""
    x = torch.randint(256, (60_000, 3072), dtype=torch.uint8)
    y = torch.randint(10, (60_000,))
    return Dataset("noise, 50000 of 3072", (3, 32, 32), 10, x[:50_000], y[:50_000], x[50_000:], y[50_000:])


def epochs(trainer: Trainer, count: int) -> list[float]:
    data, times = trainer.data, []
    for _ in range(count):
        start = time.perf_counter()
        trainer.train_epoch()
        trainer.evaluate(data.evaluated_x, data.evaluated_y)
        times.append(time.perf_counter() - start)
    return times


def lanes_together(runs: list[Run], prepared, device) -> float:
    """Seconds for an epoch of all of these, each in a stream of its own."""
    ready = threading.Barrier(len(runs))

    def work(run):
        with use_own_streams(device) as capture_stream:
            trainer = Trainer(run, prepared, capture_stream)
            trainer.train_epoch()
            ready.wait()
            return epochs(trainer, 4)

    with ThreadPoolExecutor(len(runs)) as pool:
        return statistics.median(seconds for times in pool.map(work, runs) for seconds in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--data-dir", type=Path, help="where MNIST is; without it only noise is used")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--hidden", nargs="+", type=int, default=[4000, 4000])
    parser.add_argument("--lanes", nargs="*", type=int, default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = options.device
    rows = []
    sets = [like_cifar()] + ([load("mnist", options.data_dir, download=False)] if options.data_dir else [])
    for data in sets:
        base = Run(dataset=data.name, step_size=1e-6, hidden=tuple(options.hidden))
        prepared = prepare_data(data, base, device)
        for dropout in (0.0, 0.5):
            for name in options.methods:
                trainer = Trainer(dataclasses.replace(base, method=name, dropout=dropout), prepared)
                first, *rest = epochs(trainer, 4)
                row = {"data": data.name, "method": name, "dropout": dropout, "lanes": 1,
                       "seconds": statistics.median(rest), "first": first}  # fmt: skip
                rows.append(row)
                print(json.dumps(row), flush=True)
                del trainer
        for count in options.lanes:
            for name in ("sgd", "path-sgd"):
                run = dataclasses.replace(base, method=name)
                row = {"data": data.name, "method": name, "dropout": 0.0, "lanes": count,
                       "seconds": lanes_together([run] * count, prepared, device)}  # fmt: skip
                rows.append(row)
                print(json.dumps(row), flush=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"machine": device_name(device), "torch": torch.__version__, "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
