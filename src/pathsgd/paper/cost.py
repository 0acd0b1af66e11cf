"""What a step of Path-SGD costs on a study's own network, beside SGD's."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from pathsgd.bench.measure import Setting, measure
from pathsgd.bench.methods import BASELINE
from pathsgd.console.machine import name_of
from pathsgd.paper.config import Study
from pathsgd.paper.config_json import from_json
from pathsgd.paper.experiment import store
from pathsgd.paper.experiment.results import DataInfo
from pathsgd.paper.experiment.training import architecture

SECONDS = 1.5
"""For each method."""


@dataclass(frozen=True)
class Cost:
    """Whole training steps."""

    net: str
    device: str
    sgd_us: float
    path_us: float

    @property
    def ratio(self) -> float:
        return self.path_us / self.sgd_us


def measured(study: Study, info: DataInfo, device: torch.device) -> Cost:
    features = math.prod(info.shape)
    name = "-".join(map(str, (features, *study.hidden, info.classes)))
    setting = Setting(
        name,
        lambda: architecture(study.net, info.shape, study.hidden, info.classes),
        (study.batch, features),
        classes=info.classes,
        tf32=study.tf32,
    )
    rows, _ = measure(setting, (BASELINE, "PathSGD"), SECONDS, 1.0, device)
    sgd, path = (row.train_us for row in rows)
    threads = f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    return Cost(name, name_of(device) + threads, sgd, path)


def write(cost: Cost, out: Path) -> None:
    store.write_json(out / "cost.json", dataclasses.asdict(cost))


def read(out: Path) -> Cost | None:
    path = out / "cost.json"
    return from_json(Cost, store.read_json(path), str(path)) if path.exists() else None
