"""``pathsgd data``: the paper's table of data sets, from what was loaded."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pathsgd.console.tables import align
from pathsgd.errors import PathError
from pathsgd.paper.data.dataset import TABLE_1, Dataset, dimensionality
from pathsgd.paper.data.find import find
from pathsgd.paper.data.load import absent, default_data_dir, load
from pathsgd.paper.data.sources import SOURCES

HELP = "get the data sets of the paper, check them and print its Table 1"
DESCRIPTION = """\
Loads data sets, checks every file of them, and prints the paper's Table 1 from what was loaded: data set,
dimensionality, classes, training set, test set.

With names, those are loaded, and downloaded first where they are missing. Without, those that are found in
the data folder and digits; what is missing is listed, and nothing is downloaded.

  mnist       784 grey pixels, 60000 + 10000        idx files, gzipped or not        12 MB to download
  cifar10     3072 colour pixels, 50000 + 10000     the binary version              170 MB
  cifar100    3072 colour pixels, 50000 + 10000     the binary version, fine labels 169 MB
  svhn        3072 colour pixels, 73257 + 26032     format 2, two .mat files        246 MB
  digits      64 grey pixels, 1442 + 355            comes with scikit-learn
  NAME=FILE   your own: an npz file with train_x, train_y, test_x, test_y"""
EPILOG = """\
Local copies are found in the usual places below the data folder: MNIST/raw, mnist, cifar-10-batches-bin,
cifar-100-binary, SVHN, svhn, or the folder itself. The pickled Python versions of CIFAR are not read:
reading a pickle runs the code in it.

Downloads come from the authors' pages (MNIST: PyTorch's mirror), go on where they broke off if the server
allows it, and count only once their sha256 is that of the original.

In an npz file inputs are (n, features), (n, height, width) or (n, channels, height, width). uint8 is divided
by 255; floats must be finite and are taken as they are. Labels are whole numbers from 0.

The exit code is 1 if a data set cannot be loaded.

  pathsgd data                                  what is there
  pathsgd data mnist cifar10                    get these two
  pathsgd data mine=features.npz --json         check a file of your own"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("names", nargs="*", metavar="NAME", help="data sets, as listed above")
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where the files are and downloads go (default: $PATHSGD_DATA, or ~/.cache/pathsgd/data)",
    )
    parser.add_argument("--no-download", action="store_true", help="use local files only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    data_dir = options.data_dir or default_data_dir()
    names, missing = (options.names, {}) if options.names else _local(data_dir)
    download = bool(options.names) and not options.no_download
    rows: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            rows.append(row(load(name, data_dir, download=download)))
        except PathError as error:
            # Nobody asked for digits by name: without scikit-learn they are missing, and nothing is wrong.
            (missing if name == "digits" and not options.names else errors)[name] = str(error)
    if options.json:
        found = {"data_dir": str(data_dir), "datasets": rows, "missing": missing, "errors": errors}
        print(json.dumps(found, indent=1))
    else:
        for line in [*(table(rows) if rows else []), *notes(rows), *missing.values()]:
            print(line)
    for message in errors.values():
        print(f"pathsgd: {message}", file=sys.stderr)
    return 1 if errors else 0


def _local(data_dir: Path) -> tuple[list[str], dict[str, str]]:
    """The data sets that are there, and what to say of the others."""
    found = {name: find(source, data_dir) for name, source in SOURCES.items()}
    missing = {name: absent(SOURCES[name], data_dir, place) for name, place in found.items() if place.missing}
    return [*(name for name in found if name not in missing), "digits"], missing


def row(data: Dataset) -> dict[str, Any]:
    return {
        "name": data.name,
        "title": SOURCES[data.name].title if data.name in SOURCES else data.name,
        "dimensionality": dimensionality(data.shape),
        "features": data.features,
        "shape": list(data.shape),
        "classes": data.classes,
        "train": len(data.train_y),
        "test": len(data.test_y),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    keys = ("title", "dimensionality", "classes", "train", "test")
    return align([TABLE_1, *(tuple(str(r[key]) for key in keys) for r in rows)], "<<>>>")


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Files can be sound and still be a part of the original, as where somebody cut them for a quick try."""
    return [
        f"{r['title']} here is not the whole of it: the original has "
        f"{SOURCES[r['name']].counts[0]} + {SOURCES[r['name']].counts[1]} examples"
        for r in rows
        if r["name"] in SOURCES and (r["train"], r["test"]) != SOURCES[r["name"]].counts
    ]
