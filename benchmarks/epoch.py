"""An epoch of the paper's network, for each method: ``PYTHONPATH=. python benchmarks/epoch.py``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch

from study.config import Run
from study.data import Dataset
from study.files import device_name
from study.methods import METHODS
from study.sources import load
from study.training import Trainer, prepare_data


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--data-dir", type=Path, help="where MNIST is; without it only noise is used")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--hidden", nargs="+", type=int, default=[4000, 4000])
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
                row = {"data": data.name, "method": name, "dropout": dropout,
                       "seconds": statistics.median(rest), "first": first}  # fmt: skip
                rows.append(row)
                print(json.dumps(row), flush=True)
                del trainer
    if options.json is not None:
        options.json.write_text(
            json.dumps({"machine": device_name(device), "torch": torch.__version__, "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
