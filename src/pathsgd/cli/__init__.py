"""Runs one command of the program ``pathsgd``, and turns errors into one line and an exit code.

0: done. 1: the command failed. 2: the options are wrong. 130: interrupted. 141: nobody reads the output.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence

from pathsgd.errors import PathError
from pathsgd_entry_point import COMMANDS, answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``pathsgd`` with these arguments, by default those of the process, and returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    code = answer(arguments)
    if code is not None:
        return code
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a folder's name may not fit the terminal
    # Muon on a CPU without bf16: torch warns two dozen times and falls back to another product.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
    try:
        module, _ = COMMANDS[arguments[0]]  # only what is run is imported
        code = importlib.import_module(module).main(arguments[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of `pathsgd ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
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
