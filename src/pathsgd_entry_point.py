"""The program ``pathsgd``: lists its commands at once, and imports torch only to run one.

It stands beside the package, because importing anything from ``pathsgd`` imports torch, which takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence

COMMANDS = {
    "inspect": ("pathsgd.cli.inspect", "print a model's path graph, path norm and imbalance"),
}
"""Name -> (module, summary). The module has a function ``main(arguments)`` that returns the exit code."""
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
    unknown = f"pathsgd: unknown command {first!r} (one of {', '.join(COMMANDS)})"
    print(unknown if first else usage, file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``pathsgd`` with these arguments, by default those of the process, and returns the exit code.

    0: done. 1: the command failed. 2: the options are wrong. 130: interrupted. 141: nobody reads the output.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = answer(arguments)
        if code is None:
            code = run(*arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # of `pathsgd ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    return code


def run(command: str, *arguments: str) -> int:
    """Runs a command, and turns errors into one line and an exit code."""
    # A KeyboardInterrupt in the middle of an import prints a traceback of torch's own files.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    module = importlib.import_module(COMMANDS[command][0])  # only what is run is imported
    from pathsgd.errors import PathError

    signal.signal(signal.SIGINT, handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a folder's name may not fit the terminal
    # Muon on a CPU without bf16: torch warns two dozen times and falls back to another product.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
    try:
        return int(module.main(arguments))
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except PathError as error:
        return _fail(str(error))
    except OSError as error:
        reason = " ".join((error.strerror or str(error)).split()) or type(error).__name__
        return _fail(f"{error.filename}: {reason}" if error.filename else reason)


def _fail(message: str, code: int = 1) -> int:
    print(f"pathsgd: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
