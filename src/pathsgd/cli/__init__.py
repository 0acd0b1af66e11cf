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


def run(module: str, arguments: Sequence[str]) -> int:
    """Runs ``main(arguments)`` of a module and returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a folder's name may not fit the terminal
    # Muon on a CPU without bf16: torch warns two dozen times and falls back to another product.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
    try:
        code: int = importlib.import_module(module).main(arguments)  # only what is run is imported
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
