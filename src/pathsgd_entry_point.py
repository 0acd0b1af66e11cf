"""The program ``pathsgd``: says at once what it can do, and imports torch only to do it.

It stands beside the package, because importing anything from ``pathsgd`` imports torch, which takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence

COMMANDS = ("inspect", "compare")
USAGE = """\
usage: pathsgd COMMAND [OPTIONS]

Rescaling-invariant training for PyTorch.

  inspect     print a model's path graph, path norm and imbalance
  compare     train a model by AdamW, by AdamW after `balance`, and by BalancedMuon

`pathsgd COMMAND --help` lists the options of a command; `pathsgd --version` prints the version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``pathsgd`` with these arguments, by default those of the process, and returns the exit code.

    0: done. 1: the command failed. 2: the options are wrong. 130: interrupted. 141: nobody reads the output.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    first = arguments[0] if arguments else ""
    try:
        if first in COMMANDS:
            code = _run(first, arguments[1:])
        elif first in ("-h", "--help", "--version"):
            print(f"pathsgd {importlib.metadata.version('pathsgd')}" if first == "--version" else USAGE)
            code = 0
        else:
            wrong = f"pathsgd: unknown command {first!r} (one of {', '.join(COMMANDS)})"
            print(wrong if first else USAGE, file=sys.stderr)
            code = 2
        sys.stdout.flush()
    except BrokenPipeError:  # of `pathsgd ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    return code


def _run(name: str, arguments: Sequence[str]) -> int:
    """Runs a command, and turns errors into one line and an exit code."""
    # A KeyboardInterrupt in the middle of an import prints a traceback of torch's own files.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = importlib.import_module(f"pathsgd.cli.{name}")
    from pathsgd.errors import PathError

    signal.signal(signal.SIGINT, handler)
    try:
        command.main(arguments)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except PathError as error:
        return _fail(str(error))
    except OSError as error:
        reason = " ".join((error.strerror or str(error)).split()) or type(error).__name__
        return _fail(f"{error.filename}: {reason}" if error.filename else reason)
    return 0


def _fail(message: str, code: int = 1) -> int:
    print(f"pathsgd: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
