"""Manifest of a study: the versions, machine, revision and time of every process that trained its runs."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pathsgd import PathError
from study.files import read_json, write_json

PACKAGES = ("pathsgd", "torch", "triton", "numpy", "scipy", "scikit-learn", "matplotlib")
Manifest = dict[str, Any]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def add_manifest(path: Path, device: torch.device) -> None:
    """Adds this process, which trains on this device, to the list in a file, unless an equal one is there."""
    manifests, new = read_manifests(path), _make_manifest(device)
    if not any({**one, "written": new["written"]} == new for one in manifests):
        write_json(path, [*manifests, new])


def read_manifests(path: Path) -> list[Manifest]:
    manifests: list[Manifest] = read_json(path, list) if path.exists() else []
    if not all(isinstance(one, dict) for one in manifests):
        raise PathError(f"{path}: expected a list of objects")
    return manifests


def _make_manifest(device: torch.device) -> Manifest:
    return {
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m study", *sys.argv[1:]]),
        "revision": _find_revision(),
        "python": platform.python_version(),
        "packages": {name: text for name in PACKAGES if (text := _find_version(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _find_revision() -> str | None:
    """Git hash of the checkout, and whether it was changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
