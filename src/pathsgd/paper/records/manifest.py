"""How and where runs were trained: versions, machine, revision, time."""

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
from pathsgd import PathError
from pathsgd.console.devices import device_name
from pathsgd.paper.records.json_files import read_json, write_json

PACKAGES = ("pathsgd", "torch", "triton", "numpy", "scipy", "scikit-learn", "matplotlib")
Manifest = dict[str, Any]


def add_manifest(path: Path, own: Manifest) -> None:
    """Adds a process to the list in a file, unless an equal one is there."""
    found = read_manifests(path)
    if not any({**one, "written": own["written"]} == own for one in found):
        write_json(path, [*found, own])


def read_manifests(path: Path) -> list[Manifest]:
    """One for every process that trained some of the runs."""
    found: list[Manifest] = read_json(path, list) if path.exists() else []
    if not all(isinstance(one, dict) for one in found):
        raise PathError(f"{path}: expected a list of objects")
    return found


def make_manifest(device: torch.device) -> Manifest:
    """Of this process, which trains on this device."""
    return {
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["pathsgd", *sys.argv[1:]]),
        "revision": _revision(),
        "source": _source_checksum(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _source_checksum() -> str:
    """Of the package's files: a revision with changes does not say which."""
    package = Path(pathsgd.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _revision() -> str | None:
    """The git hash of the source if this is a checkout, and whether it was changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
