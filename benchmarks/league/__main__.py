"""The command line: pack, run, table."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path

from . import __doc__ as about
from .networks import NETWORKS, SETS
from .pack import pack_folder
from .plan import STAGES, Setting
from .records import read_records
from .run import run_jobs
from .table import render
from .train import STARTS
from .unseen_pack import pack_unseen

RESULTS = Path("results/league")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.league", description=(about or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("pack", help="pack the data sets into a few small files")
    command.add_argument(
        "source", type=Path, help="holds cifar-10-batches-bin and the files of unseen_pack.py"
    )
    command.add_argument("target", type=Path)

    command = commands.add_parser("run", help="run the jobs of a stage that are not recorded yet")
    command.add_argument("stage", choices=list(STAGES))
    command.add_argument("out", type=Path, help="a folder")
    command.add_argument(
        "--networks", nargs="+", required=True, metavar="NETWORK", help=f"or {', '.join(SETS)}"
    )
    command.add_argument("--methods", nargs="+", required=True, metavar="METHOD")
    command.add_argument("--seeds", nargs="+", type=int, default=[0])
    command.add_argument("--lengths", nargs="+", type=float, default=[1.0])
    command.add_argument("--batches", nargs="+", type=float, default=[1.0])
    command.add_argument("--starts", nargs="+", choices=STARTS, default=["usual"])
    command.add_argument("--records", nargs="*", type=Path, default=[RESULTS], help="what was run before")
    command.add_argument(
        "--data", type=Path, default=Path("data"), help="holds the data, packed or as published"
    )
    command.add_argument("--workers", type=int, default=1)
    command.add_argument("--seconds", type=float, default=math.inf)
    command.add_argument("--device", choices=("cpu", "cuda"))

    command = commands.add_parser("table", help="print every table")
    command.add_argument("records", nargs="*", type=Path, default=[RESULTS])

    options = parser.parse_args(arguments)
    if options.command == "pack":
        for path in (
            *pack_folder(options.source, options.target),
            *pack_unseen(options.source, options.target),
        ):
            print(f"{path} {path.stat().st_size / 2**20:.1f} MiB")
        return 0
    if options.command == "table":
        print(render(read_records(options.records)), end="")
        return 0
    setting = Setting(
        find_networks(options.networks), options.methods, options.seeds, options.lengths, options.batches,
        options.starts,
    )  # fmt: skip
    run_jobs(
        partial(STAGES[options.stage], setting), options.out, options.data, known=options.records,
        workers=options.workers, seconds=options.seconds, device=options.device,
    )  # fmt: skip
    return 0


def find_networks(names: list[str]) -> list[str]:
    """Names of networks and of sets, as names of networks."""
    found = [network for name in names for network in SETS.get(name, (name,))]
    for name in found:
        if name not in NETWORKS:
            raise SystemExit(f"there is no network {name!r}; there are {', '.join(NETWORKS)}")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
