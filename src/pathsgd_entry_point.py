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
    "inspect": ("pathsgd.cli.inspect", "print a model's path graph, path norm and imbalance"),
    "bench": ("pathsgd.cli.bench", "time a training step of a model with ours and with torch's optimizers"),
}
"""Name -> (module, summary). The module has a function ``main(arguments)`` that returns the exit code."""
STUDY_COMMANDS = ("reproduce", "sweep", "train", "figures", "data")
"""Commands of the paper's study, which is not installed."""
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
        message = f"the study is run from a clone of the repository: python -m study {first}"
    else:
        message = f"unknown command {first!r} (one of {', '.join(COMMANDS)})"
    print(f"pathsgd: {message}" if first else usage, file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``pathsgd`` with these arguments, by default those of the process, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = answer(arguments)
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
    module, _ = COMMANDS[arguments[0]]
    return cli.run(module, arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
