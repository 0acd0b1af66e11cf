"""Where numbers come from: versions, machine, revision, time."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import pathsgd
from pathsgd.console.machine import name_of
from pathsgd.errors import PathError
from pathsgd.paper.experiment import store

PACKAGES = ("pathsgd", "torch", "triton", "numpy", "scipy", "scikit-learn", "matplotlib")


Manifest = dict[str, Any]


def note(path: Path, device: torch.device) -> None:
    """Adds how and where this process trains to the list in a file, unless it is there."""
    own = manifest(device)
    noted = read(path)
    if not any({**one, "written": own["written"]} == own for one in noted):
        store.write_json(path, [*noted, own])


def read(path: Path) -> list[Manifest]:
    """Of every process that trained some of the runs, as far as it was noted."""
    if not path.exists():
        return []
    found = store.read_json(path)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise PathError(f"{path}: expected a list of objects")
    return found


def manifest(device: torch.device) -> Manifest:
    return {
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["pathsgd", *sys.argv[1:]]),
        "revision": _revision(),
        "source": _source(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "device": name_of(device),
        "threads": torch.get_num_threads(),
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _source() -> str:
    """A checksum of the package's own files: a revision with changes may be any."""
    package = Path(pathsgd.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _revision() -> str | None:
    """The git hash of the source, if this is a checkout, and whether it was changed since."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if git("ls-files", "--error-unmatch", __file__):
            return git("rev-parse", "HEAD") + (
                " with changes" if git("status", "--porcelain", "-uno") else ""
            )
    except (OSError, subprocess.SubprocessError):
        pass
    return None
