"""Files that are whole or not there, and folders that one process works in."""

from __future__ import annotations

import json

import pytest
from pathsgd.console.files import write_atomically

from pathsgd.errors import PathError
from pathsgd.paper.records.folder_lock import lock_folder
from pathsgd.paper.records.json_files import encode_line, write_json


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"x": float("nan")})
    assert json.loads(encode_line({"x": float("nan"), "y": 1.5})) == {"x": None, "y": 1.5}


def test_one_process_at_a_time(tmp_path):
    def second():
        with lock_folder(tmp_path / "out"):
            pass

    with lock_folder(tmp_path / "out"), pytest.raises(PathError, match="another process is at work in"):
        second()
    second()
