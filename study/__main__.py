"""``python -m study COMMAND``: runs one command, and turns errors into one line and an exit code.

0: done. 1: the command failed, or what it trained diverged. 2: the options are wrong. 130: interrupted.
"""

import io
import os
import signal
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "show in a minute what rescaling does to training",
    "reproduce": "run the paper's whole study, small or at full size",
    "sweep": "choose step sizes on validation points",
    "train": "train one network",
    "figures": "redraw the figures and the report of a study",
    "data": "get the paper's data sets, check them and print its Table 1",
}
USAGE = """\
usage: python -m study COMMAND [OPTIONS]

{commands}

`python -m study COMMAND --help` lists the options of a command."""


def main(arguments: Sequence[str]) -> int:
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of `python -m study ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: Sequence[str]) -> int:
    first = arguments[0] if arguments else ""
    if first not in COMMANDS:
        if first and first not in ("-h", "--help"):
            return _fail(f"unknown command {first!r} (one of {', '.join(COMMANDS)})", 2)
        commands_text = "\n".join(f"  {name:12}{text}" for name, text in COMMANDS.items())
        print(USAGE.format(commands=commands_text), file=sys.stdout if first else sys.stderr)
        return 0 if first else 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a folder's name may not fit the terminal
    # A KeyboardInterrupt in the middle of an import prints a traceback of torch's own files.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from pathsgd import PathError
        from study import commands
    except ImportError as error:
        return _fail(f"the study needs {error.name}: pip install -e '.[study]'")
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        return commands.MAIN[first](arguments[1:])
    except KeyboardInterrupt:
        resumes = "; the same command resumes" if first in ("reproduce", "sweep", "train") else ""
        return _fail(f"interrupted{resumes}", 130)
    except PathError as error:
        return _fail(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = " ".join((error.strerror or str(error)).split()) or type(error).__name__
        return _fail(f"{error.filename}: {reason}" if error.filename else reason)
    except (MemoryError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else "MemoryError"
        # A CPU reports a full memory in a plain RuntimeError.
        parts = ("out of memory", "allocate memory", "not enough memory", "overflowed")
        if isinstance(error, RuntimeError) and not any(part in text for part in parts):
            raise
        return _fail(f"out of memory: {text}; try smaller --hidden, or --lanes 1")


def _fail(message: str, code: int = 1) -> int:
    print(f"study: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
