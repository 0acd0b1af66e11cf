"""Files that are whole or not there."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside ``path`` and renames: at any moment the old file or the new one, never a part of one.

    Raises:
        OSError: Names ``path``, whichever file could not be written.
    """
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_temporaries(folder: Path) -> None:
    """Removes what a kill in :func:`write_atomically` has left in a folder that nobody else writes to."""
    for left in folder.glob(f".*.{'[0-9a-f]' * 8}"):
        left.unlink(missing_ok=True)
