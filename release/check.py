"""Checks what is released: installs the wheel, then the source distribution, and uses each.

The environment is an empty one, into which pip brings torch and nothing else. `make dist` builds both and
runs this.

    python release/check.py DIST [--constraint FILE] [--python INTERPRETER]
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

IMPORT_LIMIT = 0.3
"""Seconds that `import pathsgd` may take after `import torch`, the median of five."""
SDIST_LIMIT = 2**20
"""Bytes; figures and results are for readers of the repository."""
IMPORT = "import time, torch; start = time.perf_counter(); import pathsgd; print(time.perf_counter() - start)"
SMOKE_TEST = Path(__file__).with_name("smoke.py")


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel has nothing but the library, and neither has anything large."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    allowed = ("pathsgd/", "pathsgd_entry_point.py", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/")
    if strays := [name for name in names if not name.startswith(allowed)]:
        sys.exit(f"{wheel.name} has more than the library: {strays}")
    if dead := re.findall(r"\]\((?!https:)[^)]{2,}\)", metadata):
        sys.exit(f"the page of {wheel.name} on PyPI would have dead links: {dead}")
    if "pathsgd/py.typed" not in names:
        sys.exit(f"{wheel.name} lacks pathsgd/py.typed: type checkers would not look at it")
    if sdist.stat().st_size > SDIST_LIMIT:
        with tarfile.open(sdist) as archive:
            largest = sorted(archive.getmembers(), key=lambda member: -member.size)[:5]
        sys.exit(f"{sdist.name} is larger than {SDIST_LIMIT} bytes: {[(x.name, x.size) for x in largest]}")
    print(f"{wheel.name}: {wheel.stat().st_size} bytes; {sdist.name}: {sdist.stat().st_size} bytes")


def check_import_time(python: Path, folder: str) -> None:
    """Of a package that pip has compiled to bytecode."""
    times = [float(subprocess.check_output([python, "-I", "-c", IMPORT], cwd=folder)) for _ in range(6)]
    median = statistics.median(times[1:])  # the first one reads torch from the disk
    print(f"import pathsgd: {median:.3f} s after import torch, median of 5")
    if median > IMPORT_LIMIT:
        sys.exit(
            f"more than {IMPORT_LIMIT} s: `python -X importtime -c 'import pathsgd'` shows where it goes"
        )


def only(folder: Path, pattern: str) -> Path:
    """The one file of that name."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"expected one {pattern} in {folder}, found {[path.name for path in found]}")
    return found[0].resolve()


def main() -> None:
    """Makes a temporary environment, which needs about a gigabyte while this runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("dist", type=Path, help="the folder that `python -m build` has written")
    parser.add_argument("--constraint", type=Path, help="versions of what pip installs, torch's among them")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    options = parser.parse_args()
    wheel, sdist = only(options.dist, "*.whl"), only(options.dist, "*.tar.gz")
    check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory(prefix="pathsgd-dist-") as folder:
        subprocess.check_call([options.python, "-m", "venv", folder])
        python = Path(folder, "bin", "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        constraint = ["--constraint", options.constraint.resolve()] if options.constraint else []
        for archive in wheel, sdist:
            subprocess.check_call([*pip, "install", *constraint, archive], cwd=folder)
            subprocess.check_call([python, "-I", SMOKE_TEST], cwd=folder)
            if archive is wheel:
                check_import_time(python, folder)
                subprocess.check_call([*pip, "uninstall", "--yes", "pathsgd"], cwd=folder)
            print(f"{archive.name}: installed and used")


if __name__ == "__main__":
    main()
