"""What the training commands share: where results go, on what device, with which data."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pathsgd.console.machine import check_memory, device_of, share_out, weights_of
from pathsgd.errors import PathError
from pathsgd.paper.config import Run, Setup, Study, StudySetup
from pathsgd.paper.data.load import load
from pathsgd.paper.experiment.conduct import Datasets, Place, Reporter
from pathsgd.paper.experiment.execute import Habits
from pathsgd.paper.experiment.store import alone_in
from pathsgd.paper.progress import Progress


def loaded(names: Iterable[str], setup: Setup) -> Datasets:
    return {name: load(name, setup.data_dir, download=setup.download) for name in names}


def place_of(
    setup: Setup, datasets: Datasets, config: Study | Run, methods: Sequence[str],
    out: Path, keep_checkpoints: bool = False,
) -> Place:  # fmt: skip
    device = device_of(setup.device)
    weights = max(weights_of(data.features, config.hidden, data.classes) for data in datasets.values())
    check_memory(device, weights)
    lanes = setup.lanes if isinstance(setup, StudySetup) else None
    if config.tf32 and (lanes or 1) > 1:
        raise PathError("--tf32 is a setting of the whole process, which path methods change: --lanes 1")
    alone = config.tf32 or config.net == "conv"  # whose activations take more memory than its weights
    lanes = share_out(device, weights, lanes, methods, alone)
    return Place(
        out,
        device,
        lanes,
        Habits(setup.checkpoint_seconds, keep_checkpoints),
        isinstance(setup, StudySetup) and setup.replace,
    )


def _is_memory(text: str) -> bool:
    """A CPU that has none left says so in a plain RuntimeError."""
    parts = ("out of memory", "allocate memory", "not enough memory", "size calculation overflowed")
    return any(part in text for part in parts)


@contextmanager
def reporting(setup: Setup, quiet: bool, out: Path) -> Iterator[Reporter]:
    """Inside, the only process at work in the folder, with progress on the terminal."""
    reporter: Reporter = Progress(quiet)
    with alone_in(out):
        if setup.tensorboard:
            from pathsgd.paper.tensorboard import Logged

            reporter = Logged(reporter, out / "tensorboard")
        try:
            yield reporter
        except KeyboardInterrupt:
            reporter.close()
            print("pathsgd: stopped; the same command goes on from here", file=sys.stderr)
            raise
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            text = str(error).splitlines()[0] if str(error) else "MemoryError"
            if isinstance(error, RuntimeError) and not _is_memory(text):
                raise
            raise PathError(f"out of memory: {text}; try smaller --hidden, or --lanes 1") from None
        finally:
            reporter.close()
