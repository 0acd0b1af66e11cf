"""Downloads by pooch: checked by their sha256, and never half a file under its name."""

from __future__ import annotations

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

from pathsgd import PathError
from pathsgd.console.optional_imports import import_optional
from pathsgd.paper.data.file_checks import one_line, reading
from pathsgd.paper.data.sources import Remote

RETRIES = 3
TIMEOUT = 30.0
"""Seconds without a byte until a connection counts as broken."""


def fetch(remote: Remote, folder: Path) -> None:
    """Downloads a file into a folder, where it appears once it is whole and has the right checksum."""
    pooch = import_optional("pooch", f"downloading {remote.name}")
    requests = import_optional("requests", f"downloading {remote.name}")
    target = folder / remote.name
    print(f"downloading {remote.url} ({remote.size / 1e6:.1f} MB) to {target}", file=sys.stderr)
    pooch.get_logger().setLevel("ERROR")  # what it would say is said here
    files = pooch.create(
        folder, base_url="", registry={remote.name: f"sha256:{remote.sha256}"},
        urls={remote.name: remote.url}, retry_if_failed=RETRIES,
    )  # fmt: skip
    downloader = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty() and find_spec("tqdm") is not None,
        timeout=TIMEOUT,
        headers={"Accept-Encoding": "identity"},  # the checksum is that of the file as it is
    )
    try:
        files.fetch(remote.name, downloader=downloader)
    except requests.RequestException as error:
        raise PathError(
            f"{remote.url} cannot be downloaded ({one_line(error)}): run again, or put the file at {target}"
        ) from error
    except ValueError as error:
        raise PathError(
            f"{remote.url} is not the original: its sha256 is not {remote.sha256}; it was deleted, run again "
            f"or put the original at {target}"
        ) from error
    except OSError as error:
        raise PathError(
            f"{target} cannot be written ({one_line(error)}): choose another folder with --data-dir"
        ) from error


def check_sha256(path: Path, remote: Remote) -> None:
    with reading(path):
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != remote.sha256:
        raise PathError(
            f"{path} is not the original: its sha256 is {found}, expected {remote.sha256}; delete it to have "
            "it downloaded again"
        )
