"""The command line: pack, plan, run, table, figure, summary."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from . import __doc__ as about
from .networks import NETWORKS
from .pack import pack_folder
from .plan import AFRESH, EIGHT, LONG, STAGES, Setting, plan
from .records import read_jobs, read_records, without_recorded, write_jobs
from .run import run_jobs
from .train import STARTS, parse_start

RESULTS = Path("results/transfer")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer", description=(about or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("pack", help="pack 30000 images of CIFAR-10 into three files of 17 MB")
    command.add_argument("source", type=Path, help="holds cifar-10-batches-bin")
    command.add_argument("target", type=Path)

    command = commands.add_parser("plan", help="write the jobs of a stage that are not recorded yet")
    command.add_argument("stage", choices=list(STAGES))
    command.add_argument("jobs", type=Path, help="the file to write")
    command.add_argument(
        "--records", type=Path, nargs="*", default=[RESULTS], help="folders or files of records"
    )
    command.add_argument(
        "--networks", nargs="+", choices=list(NETWORKS), metavar="NETWORK",
        help="all of them; four for more than five epochs, eight for balance",
    )  # fmt: skip
    command.add_argument("--methods", nargs="+", default=[], metavar="METHOD")
    command.add_argument("--starts", nargs="+", default=None, type=_start, metavar="START")
    command.add_argument("--epochs", type=int, default=5)

    command = commands.add_parser("run", help="run jobs and record them")
    command.add_argument("jobs", type=Path)
    command.add_argument("out", type=Path, help="a folder; what is recorded there is not run again")
    command.add_argument(
        "--data", type=Path, default=Path("data"), help="holds CIFAR-10, packed or as published"
    )
    command.add_argument("--workers", type=int, default=1)
    command.add_argument("--seconds", type=float, default=math.inf)
    command.add_argument("--steps", type=int, help="at most so many steps an epoch, to try things out")
    command.add_argument("--device", choices=("cpu", "cuda"))
    command.add_argument("--in-order", action="store_true", help="not the longest jobs first")

    for name, text in (("table", "write the tables"), ("figure", "draw the curves over the rate")):
        command = commands.add_parser(name, help=text)
        command.add_argument("records", type=Path, nargs="*", default=[RESULTS])
        command.add_argument("--into", type=Path, default=RESULTS)

    command = commands.add_parser("summary", help="print the tables of the stage balance and of ablations")
    command.add_argument("records", type=Path, nargs="+")

    options = parser.parse_args(arguments)
    if options.command == "pack":
        for path in pack_folder(options.source, options.target):
            print(f"{path} {path.stat().st_size / 2**20:.1f} MiB")
    elif options.command == "plan":
        records = read_records(options.records)
        starts = options.starts or {"seeds": STARTS[:2], "balance": STARTS}.get(options.stage, STARTS[:1])
        afresh = options.stage in AFRESH
        networks = options.networks or (EIGHT if afresh else LONG if options.epochs > 5 else tuple(NETWORKS))
        setting = Setting(networks, options.methods, starts, options.epochs)
        jobs = without_recorded(plan(options.stage, setting, records), [] if afresh else records)
        write_jobs(options.jobs, jobs)
        print(f"{options.jobs}: {len(jobs)} jobs")
    elif options.command == "run":
        run_jobs(
            read_jobs(options.jobs), options.out, options.data, workers=options.workers,
            seconds=options.seconds, steps=options.steps, device=options.device, in_order=options.in_order,
        )  # fmt: skip
    elif options.command == "table":
        from .table import write_table

        print(write_table(read_records(options.records), options.into))
    elif options.command == "summary":
        from .summary import summarize

        print(summarize(read_records(options.records)), end="")
    else:
        from .figure import draw_figure

        print(draw_figure(read_records(options.records), options.into))
    return 0


def _start(text: str) -> str:
    parse_start(text)
    return text


if __name__ == "__main__":
    raise SystemExit(main())
