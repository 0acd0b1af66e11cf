"""``pathsgd data``: the paper's table of data sets, from what was loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from pathsgd.console.command_line import parse
from pathsgd.console.tables import align
from pathsgd.errors import PathError
from pathsgd.paper.data.dataset import TABLE_1, Dataset, dimensionality
from pathsgd.paper.data.load import default_data_dir, describe_missing, load
from pathsgd.paper.data.sources import SOURCES


@dataclass(frozen=True)
class Data:
    """Loads data sets, checks every file of them, and prints the paper's Table 1 from what was loaded.

    With names, those are loaded, and downloaded first where they are missing. Without, digits and those that
    are found in the data folder; missing ones are listed, and nothing is downloaded.

      mnist       784 grey pixels, 60000 + 10000        idx files, gzipped or not        12 MB to download
      cifar10     3072 colour pixels, 50000 + 10000     the binary version              170 MB
      cifar100    3072 colour pixels, 50000 + 10000     the binary version, fine labels 169 MB
      svhn        3072 colour pixels, 73257 + 26032     format 2, two .mat files        246 MB
      digits      64 grey pixels, 1442 + 355            comes with scikit-learn
      NAME=FILE   your own: an npz file with train_x, train_y, test_x, test_y

    Local copies are found in the usual places below the data folder: MNIST/raw, mnist, cifar-10-batches-bin,
    cifar-100-binary, SVHN, svhn, or the folder itself. The pickled Python versions of CIFAR are not read:
    reading a pickle runs the code in it.

    Downloads come from the authors' pages (MNIST: PyTorch's mirror), are resumed if the server allows it, and
    count only once their sha256 is that of the original.

    In an npz file inputs are (n, features), (n, height, width) or (n, channels, height, width). uint8 is
    divided by 255; floats must be finite and are taken as they are. Labels are whole numbers from 0.

    The exit code is 1 if a data set cannot be loaded.

    examples:
      pathsgd data                                  what is there
      pathsgd data mnist cifar10                    get these two
      pathsgd data mine=features.npz --json         check a file of your own
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Data sets, as listed above."""
    data_dir: Path | None = None
    """Where the files are and downloads go; by default $PATHSGD_DATA, or ~/.cache/pathsgd/data."""
    download: bool = True
    """Download data sets that are named and missing."""
    json: bool = False
    """Print JSON instead of a table."""


def main(arguments: Sequence[str]) -> int:
    options = parse(Data, arguments, "data")
    data_dir = options.data_dir or default_data_dir()
    names, missing = (options.names, {}) if options.names else _find_local(data_dir)
    download = bool(options.names) and options.download
    rows: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            rows.append(_row(load(name, data_dir, download=download)))
        except PathError as error:
            # Without scikit-learn digits are missing, which is an error only where they were named.
            (missing if name == "digits" and not options.names else errors)[name] = str(error)
    if options.json:
        found = {"data_dir": str(data_dir), "datasets": rows, "missing": missing, "errors": errors}
        print(json.dumps(found, indent=1))
    else:
        for line in [*(_table(rows) if rows else []), *_notes(rows), *missing.values()]:
            print(line)
    for message in errors.values():
        print(f"pathsgd: {message}", file=sys.stderr)
    return 1 if errors else 0


def _find_local(data_dir: Path) -> tuple[list[str], dict[str, str]]:
    """The data sets that are there, and a message for each of the others."""
    found = {name: source.find_files(data_dir) for name, source in SOURCES.items()}
    missing = {
        name: describe_missing(SOURCES[name], data_dir, place)
        for name, place in found.items()
        if place.missing
    }
    return [*(name for name in found if name not in missing), "digits"], missing


def _row(data: Dataset) -> dict[str, Any]:
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


def _table(rows: list[dict[str, Any]]) -> list[str]:
    keys = ("title", "dimensionality", "classes", "train", "test")
    return align([TABLE_1, *(tuple(str(row[key]) for key in keys) for row in rows)], "<<>>>")


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    """Files can be sound and still be a part of the original, as where somebody cut them for a quick try."""
    counts = {name: source.counts for name, source in SOURCES.items()}
    return [
        f"{row['title']} here is not the whole of it: the original has {train} + {test} examples"
        for row in rows
        for train, test in [counts.get(row["name"], (row["train"], row["test"]))]
        if (row["train"], row["test"]) != (train, test)
    ]
