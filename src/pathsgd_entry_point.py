"""The program ``pathsgd``: lists its commands at once, and imports torch only to run one.

It stands beside the package, because importing anything from ``pathsgd`` imports torch, which takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence

COMMANDS = {
    "inspect": ("pathsgd.inspect.inspect_command", "print a model's path graph, path norm and imbalance"),
    "bench": ("pathsgd.bench.bench_command", "time a training step of Path-SGD and of torch's optimizers"),
}
"""Name -> (module, summary). The module has a function ``main(arguments)`` that returns the exit code."""
STUDY_COMMANDS = ("reproduce", "sweep", "train", "figures", "data")


USAGE = """\
usage: pathsgd COMMAND [OPTIONS]

Rescaling-invariant training for PyTorch.

{commands}

`pathsgd COMMAND --help` lists the options of a command; `pathsgd --version` prints the version."""


def answer(arguments: Sequence[str]) -> int | None:
    """Answers what needs no command. Returns the exit code, or None when a command is to be run."""
    first = arguments[0] if arguments else ""
    usage = USAGE.format(commands="\n".join(f"  {name:12}{text}" for name, (_, text) in COMMANDS.items()))
    if first in COMMANDS:
        return None
    if first == "--version":
        print(f"pathsgd {importlib.metadata.version('pathsgd')}")
        return 0
    if first in ("-h", "--help"):
        print(usage)
        return 0
    if first in STUDY_COMMANDS:
        print(f"pathsgd: the study is run from a clone, by `python -m study {first}`", file=sys.stderr)
        return 2
    unknown = f"pathsgd: unknown command {first!r} (one of {', '.join(COMMANDS)})"
    print(unknown if first else usage, file=sys.stderr)
    return 2


def main() -> int:
    """Runs the command line of this process and returns the exit code."""
    try:
        code = answer(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # of `pathsgd --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    if code is not None:
        return code
    # A KeyboardInterrupt in the middle of an import prints a traceback of torch's own files.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pathsgd import cli

    signal.signal(signal.SIGINT, handler)
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
