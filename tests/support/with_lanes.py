"""``python with_lanes.py FOLDER COMMAND...``: a command into FOLDER/1 with one lane, into FOLDER/4 with four.

Each in a process that has imported torch and traced nothing.
"""

import os
import sys
from pathlib import Path

from study.__main__ import main as study


def main(folder: Path, command: list[str]) -> None:
    for lanes in ("1", "4"):
        child = os.fork()
        if child == 0:
            os._exit(study([*command, "--lanes", lanes, "--out", str(folder / lanes)]))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
