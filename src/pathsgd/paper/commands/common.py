"""What the training commands share: where results go, on what device, with which data."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pathsgd.console.machine import check_memory, device_of, share_out, weights_of
from pathsgd.console.options import add_options, given, merged
from pathsgd.errors import PathError
from pathsgd.paper.config import PRESETS, Run, Study
from pathsgd.paper.data.load import load
from pathsgd.paper.experiment.conduct import Datasets, Place, Reporter
from pathsgd.paper.experiment.execute import Habits
from pathsgd.paper.experiment.store import alone_in
from pathsgd.paper.progress import Progress


def add_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="small", help="what the options change (default: small)"
    )
    group = parser.add_argument_group("the study", "the defaults shown are those of --preset small")
    add_options(group, Study, **dataclasses.asdict(PRESETS["small"]))


def study_of(options: argparse.Namespace) -> Study:
    return merged(PRESETS[options.preset], given(options, Study))


def add_place(parser: argparse.ArgumentParser, out: str) -> None:
    group = parser.add_argument_group("where and how")
    group.add_argument("--out", type=Path, metavar="DIR", help=f"folder of the results (default: {out})")
    group.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="folder of the data sets: see `pathsgd data`"
    )
    group.add_argument("--no-download", action="store_true", help="use local copies of the data only")
    group.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: a GPU if there is one)"
    )
    group.add_argument(
        "--checkpoint-seconds", type=float, default=30.0, metavar="S",
        help="save a run every so often; an interrupted one goes on from there (default: 30)",
    )  # fmt: skip
    group.add_argument("--tensorboard", action="store_true", help="also write the numbers for TensorBoard")
    group.add_argument("--quiet", action="store_true", help="print results only")
    parser.set_defaults(lanes=None, replace=False)


def add_study_place(parser: argparse.ArgumentParser, out: str) -> None:
    """Also what only a study of many runs has."""
    add_place(parser, out)
    group = parser.add_argument_group("a study's runs")
    group.add_argument("--replace", action="store_true", help="let this study replace another in its folder")
    group.add_argument(
        "--lanes", type=int, metavar="N",
        help="runs at a time (default: three on a GPU; small networks on a CPU: one per core, at most 4)",
    )  # fmt: skip


def loaded(names: Iterable[str], options: argparse.Namespace) -> Datasets:
    return {name: load(name, options.data_dir, download=not options.no_download) for name in names}


def place_of(
    options: argparse.Namespace, datasets: Datasets, config: Study | Run, methods: Sequence[str],
    out: Path, keep_checkpoints: bool = False,
) -> Place:  # fmt: skip
    device = device_of(options.device)
    if not options.checkpoint_seconds >= 0:
        raise PathError(f"Invalid --checkpoint-seconds: {options.checkpoint_seconds} (at least 0)")
    weights = max(weights_of(data.features, config.hidden, data.classes) for data in datasets.values())
    check_memory(device, weights)
    if config.tf32 and (options.lanes or 1) > 1:
        raise PathError("--tf32 is a setting of the whole process, which path methods change: --lanes 1")
    alone = config.tf32 or config.net == "conv"  # whose activations take more memory than its weights
    lanes = share_out(device, weights, options.lanes, methods, alone)
    return Place(out, device, lanes, Habits(options.checkpoint_seconds, keep_checkpoints), options.replace)


def _is_memory(text: str) -> bool:
    """A CPU that has none left says so in a plain RuntimeError."""
    parts = ("out of memory", "allocate memory", "not enough memory", "size calculation overflowed")
    return any(part in text for part in parts)


@contextmanager
def reporting(options: argparse.Namespace, out: Path) -> Iterator[Reporter]:
    """Inside, the only process at work in the folder, with progress on the terminal."""
    reporter: Reporter = Progress(options.quiet)
    with alone_in(out):
        if options.tensorboard:
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
