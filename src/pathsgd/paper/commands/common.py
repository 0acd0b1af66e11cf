"""What the training commands share: where results go, on what device, with which data."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from pathsgd.console.options import add_options, given, merged
from pathsgd.paper.config import PRESETS, Setup, Study


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


def setup_of(options: argparse.Namespace, kind: type[Setup]) -> Setup:
    names = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in vars(options).items() if name in names}
    return kind(**given, download=not options.no_download)
