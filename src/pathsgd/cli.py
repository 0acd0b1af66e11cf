"""The command ``pathsgd``."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence

from pathsgd.bench import command as bench
from pathsgd.errors import PathError
from pathsgd.inspect import command as inspect
from pathsgd.paper.commands import figures, reproduce, sweep, train
from pathsgd.paper.data import command as data
from pathsgd.paper.data.file_checks import one_line
from importlib.metadata import version

COMMANDS = {
    "reproduce": reproduce,
    "figures": figures,
    "train": train,
    "sweep": sweep,
    "bench": bench,
    "data": data,
    "inspect": inspect,
}
"""Each has HELP, DESCRIPTION, add_arguments(parser) and run(options) -> exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pathsgd", description="Rescaling-invariant training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"pathsgd {version('pathsgd')}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a folder's name may not fit the terminal
    # Muon on a CPU without bf16: two dozen lines for a product that is then made another way.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of `pathsgd ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except PathError as error:
        print(f"pathsgd: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"pathsgd: {where}{one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
