"""Downloads a file by pooch: checked against its sha256, and resumed where the server allows it."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from pathsgd.console.extras import optional
from pathsgd.errors import PathError
from pathsgd.paper.data.checks import CHUNK, one_line, reading
from pathsgd.paper.data.sources import Remote

ATTEMPTS = 4
PAUSE = 1.0
"""Seconds before the second attempt; then twice as long each time."""
TIMEOUT = 30.0
"""Seconds without a byte until a connection counts as broken."""


def fetch(remote: Remote, folder: Path) -> Path:
    """The file of that name in ``folder``, there only once it is whole and has the right checksum."""
    pooch = optional("pooch", f"downloading {remote.name}")
    target = folder / remote.name
    print(f"downloading {remote.url} ({remote.size / 1e6:.1f} MB) to {target}", file=sys.stderr)
    pooch.get_logger().setLevel("WARNING")  # it would say the same again
    downloader = Resuming(target, remote.size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pooch.retrieve(
            remote.url, f"sha256:{remote.sha256}", fname=remote.name, path=folder, downloader=downloader
        )
    except PathError:
        raise
    except ValueError as error:  # pooch has deleted it
        raise PathError(
            f"{remote.url} did not come as the original: its sha256 is not {remote.sha256}; what came is "
            f"deleted, run again or put the original at {target}"
        ) from error
    except OSError as error:
        raise PathError(
            f"{target} cannot be written ({one_line(error)}): choose another folder with --data-dir"
        ) from error
    return target


def check_sha256(path: Path, remote: Remote) -> None:
    digest = hashlib.sha256()
    with reading(path), path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != remote.sha256:
        raise PathError(
            f"{path} is not the original: its sha256 is {digest.hexdigest()}, expected {remote.sha256}; "
            "delete it to have it downloaded again"
        )


class Resuming:
    """A downloader for pooch. What has come is in a .part file until all of it has, over several runs."""

    def __init__(self, target: Path, size: int) -> None:
        self.target, self.size = target, size
        self.part = target.with_name(f"{target.name}.part")

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        requests = optional("requests", f"downloading {url}")
        failure = "the server sent no more"
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                self._continue(requests, url)
            except requests.RequestException as error:
                failure = one_line(error)
            if self._have() == self.size:
                os.replace(self.part, output_file)  # pooch checks it there and then gives it its name
                return
        raise PathError(
            f"{url} gave {self._have()} of {self.size} bytes ({failure}): run again to go on from there, or "
            f"put the file at {self.target}"
        )

    def _have(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _continue(self, requests: Any, url: str) -> None:
        """Asks for what is missing and appends what comes."""
        have = self._have()
        if have == self.size:
            return
        if have > self.size:
            have = 0
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
            if answer.status_code in (429, 500, 502, 503, 504):
                answer.raise_for_status()  # may pass: counts as a broken connection
            if answer.status_code == 416:
                self.part.unlink()  # longer than the file that is there now: of another one
            if answer.status_code not in (200, 206):
                raise PathError(
                    f"{url} is not to be had (HTTP {answer.status_code} {answer.reason}): put the file at "
                    f"{self.target}, or try again later"
                )
            if answer.status_code == 200:
                have = 0  # the whole file: this server does not resume
            self._check_length(answer, url, have)
            self._append(answer, requests, have)

    def _check_length(self, answer: Any, url: str, have: int) -> None:
        stated = answer.headers.get("Content-Range", "").removeprefix("bytes ")
        if answer.status_code == 206 and stated != f"{have}-{self.size - 1}/{self.size}":
            self.part.unlink(missing_ok=True)
            raise PathError(
                f"{url} resumed with bytes {stated!r}, expected {have}-{self.size - 1}/{self.size}: run "
                "again to start anew"
            )
        length = answer.headers.get("Content-Length")
        if answer.status_code == 200 and length is not None and length != str(self.size):
            raise PathError(
                f"{url} has {length} bytes, expected {self.size}: the file there is another one; put the "
                f"original at {self.target}"
            )

    def _append(self, answer: Any, requests: Any, have: int) -> None:
        tqdm = optional("tqdm", "downloading").tqdm
        broken = optional("urllib3.exceptions", "downloading").HTTPError
        with (
            self.part.open("ab" if have else "wb") as file,
            tqdm(
                total=self.size, initial=have, desc=self.target.name, unit="B", unit_scale=True, disable=None
            ) as bar,
        ):
            try:
                # Undecoded: the checksum is that of the file, and not of what it inflates to.
                for chunk in answer.raw.stream(CHUNK, decode_content=False):
                    chunk = chunk[: self.size - have]
                    have += file.write(chunk)
                    bar.update(len(chunk))
                    if have == self.size:
                        return
            except broken as error:
                raise requests.ConnectionError(one_line(error)) from error
