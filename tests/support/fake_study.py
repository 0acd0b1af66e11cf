"""A finished study made of files alone: no training."""

import dataclasses

from study.config import Study
from study.files import write_json
from study.methods import find_method
from study.runs import Choice, DataInfo, RunFolder, StudyResults, Trial

SPEED = {"sgd": 0.8, "adagrad": 0.6, "path-sgd": 1.2}


def falling_lines(speed, epochs, diverged):
    """A loss and errors that fall to some floor; nothing finite in the epoch of divergence."""
    falls = [0.01 + 0.99 * 2.718 ** (-speed * epoch) for epoch in range(epochs + 1)]
    names = ("epoch", "train_loss", "train_error", "test_loss", "test_error")
    rows = [
        (k, 2.3 * fall, 0.9 * fall - 0.008, 2.3 * fall, 0.02 + 0.88 * fall) for k, fall in enumerate(falls)
    ]
    lines = [dict(zip(names, row, strict=True)) for row in rows]
    if diverged:
        lines[-1] |= {"train_loss": float("nan"), "train_error": float("nan"), "test_loss": float("inf")}
    return lines


NAUGHTY = "a$b<script>alert(1)</script>=somewhere.npz"


def fake_study(out, diverged=None, unchosen=(), **options):
    """A finished study. ``diverged``: (method, init, repeat) -> epoch; ``unchosen``: (method, init)."""
    study = Study(**{"hidden": (8, 8), "epochs": 12, "dropouts": (0.0,), "step_sizes": (1.0, 0.1)} | options)
    info = DataInfo("0123456789abcdef", (1, 8, 8), 10, 1442, 355)
    manifest = {"revision": None, "packages": {"torch": "2.x<y>"}, "device": "CPU & more"}
    choices = []
    for cell in study.cells():
        bad = (cell.method, cell.init) in unchosen
        tried = [
            Trial(1.0, "diverged", 1.0, 0, "the loss was not finite in epoch 1", "x"),
            Trial(0.1, "stopped" if bad else "done", 0.0213, 7, "hopeless <>" if bad else "", "y"),
        ]
        choices.append(Choice(cell, None if bad else 0.1, tried))
        hurt = cell.init == "unbalanced" and not find_method(cell.method).invariant
        speed = SPEED.get(cell.method, 0.5) / (40 if hurt else 1)
        for k, run in enumerate(choices[-1].final_runs(study, info.checksum)):
            k = 0 if run.init == "powers-of-two" else k
            end = (diverged or {}).get((cell.method, cell.init, k))
            folder = RunFolder(out / "runs", run)
            folder.begin(falling_lines(speed * (1 + 0.1 * k), end or study.epochs, end is not None))
            reason = f"the loss was not finite in epoch {end}" if end else ""
            folder.end("diverged" if end else "done", reason, 1.0, False)
    write_json(out / "study.json", dataclasses.asdict(study))
    write_json(out / "data.json", dict.fromkeys(study.datasets, dataclasses.asdict(info)))
    write_json(out / "manifest.json", [manifest])
    write_json(out / "choices.json", [dataclasses.asdict(choice) for choice in choices])
    return StudyResults.load(out)
