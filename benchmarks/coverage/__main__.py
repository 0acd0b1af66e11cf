"""The command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from pathlib import Path

import torch

from . import __doc__ as about
from .full_size import measure_full_size
from .hugging_face import FULL_SIZE
from .measure import measure
from .models import BUILDERS
from .page import print_row, write_page

PAGE = Path("results/coverage/README.md")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coverage", description=(about or "").splitlines()[0]
    )
    parser.add_argument(
        "--models", nargs="+", metavar="MODEL", choices=list(BUILDERS), default=list(BUILDERS)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}; needs all models")
    parser.add_argument("--limit", type=int, default=120, metavar="SECONDS", help="for one model")
    options = parser.parse_args(arguments)
    if options.write and set(options.models) != set(BUILDERS):
        parser.error("--write needs all models: leave --models out")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the models
    print(f"{'':38} weights   one  both units     s  resc.   bal. one n.  steps")
    rows = []
    for name in options.models:
        rows.append(measure(name, options.limit))
        print(print_row(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if options.write:
        PAGE.write_text(write_page(rows, list(map(measure_full_size, FULL_SIZE))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
