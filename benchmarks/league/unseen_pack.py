"""Cora and Adult in one small file each, made from the files their authors published."""

from __future__ import annotations

import csv
import hashlib
import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]

NUMBERS = (0, 2, 4, 10, 11, 12)
"""The columns of Adult that hold numbers; the last of all is the income and the others hold words."""
COLUMNS = 15


def pack_unseen(sources: Path, target: Path) -> list[Path]:
    """Packs ``ind.cora.*`` and ``adult-train.csv``, ``adult-test.csv`` of a folder; returns the files."""
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for name, arrays in (("cora", original_cora(sources)), ("adult", original_adult(sources))):
        path = target / f"{name}.npz"
        np.savez_compressed(path, **arrays)
        written.append(path)
    return written


def read_packed(path: Path) -> tuple[Arrays, str]:
    """The arrays of a packed file, and a hash of what is in them."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in sorted(file.files)}
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return arrays, digest.hexdigest()[:12]


def original_cora(folder: Path) -> Arrays:
    """Planetoid's files of Cora: words of every paper, citations between papers, and their classes.

    The papers of the test come last in the file, in an order of their own; here each has its own place.
    """
    parts = {name: _unpickle(folder / f"ind.cora.{name}") for name in ("tx", "ty", "allx", "ally", "graph")}
    places = np.array([int(line) for line in (folder / "ind.cora.test.index").read_text().split()])
    known, papers = len(parts["ally"]), len(parts["ally"]) + len(places)

    rows = np.arange(papers)
    rows[known:] = places
    words: list[tuple[int, int]] = []
    for matrix, first in ((parts["allx"], 0), (parts["tx"], known)):
        entries = matrix.tocoo()
        words += zip(rows[first + entries.row].tolist(), entries.col.tolist(), strict=True)
    classes = np.empty(papers, np.uint8)
    classes[rows] = np.concatenate([parts["ally"], parts["ty"]]).argmax(1)
    citations = {(min(a, b), max(a, b)) for a, others in parts["graph"].items() for b in others if a != b}
    return {
        "words": np.array(sorted(words), np.uint16),
        "vocabulary": np.array(parts["allx"].shape[1]),
        "citations": np.array(sorted(citations), np.uint16),
        "classes": classes,
        "test": np.sort(places).astype(np.uint16),
    }


def _unpickle(path: Path) -> Any:
    """What Python 2 wrote; scipy and numpy warn of the names their modules had then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pickle.loads(path.read_bytes(), encoding="latin1")


def original_adult(folder: Path) -> Arrays:
    """The rows of training and then those of the test: numbers, words as numbers from 0 on, and incomes.
    "?" is a word as others are."""
    train, test = (list(_rows(folder / f"adult-{part}.csv")) for part in ("train", "test"))
    columns = list(zip(*train, *test, strict=True))
    words = [column for k, column in enumerate(columns[:-1]) if k not in NUMBERS]
    return {
        "numbers": np.array([columns[k] for k in NUMBERS], np.int32).T,
        "words": np.stack([np.unique(column, return_inverse=True)[1] for column in words], 1).astype(
            np.uint8
        ),
        "rich": np.array([income.startswith(">50K") for income in columns[-1]], np.uint8),
        "train": np.array(len(train)),
    }


def _rows(path: Path) -> Iterable[list[str]]:
    with path.open(newline="") as file:
        for row in csv.reader(file, skipinitialspace=True):
            if len(row) == COLUMNS:  # there are empty lines
                yield row
