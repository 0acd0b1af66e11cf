"""Files of runs and studies: whole or not there, and believed only as they were left."""

import dataclasses
import json
import pickle

import pytest
import torch

from pathsgd import PathError
from study import files
from study.files import add_manifest, encode_line, lock_folder, read_list, write_atomically, write_json
from study.runs import RunFolder
from study.sources import load
from support.short_runs import CPU, SMALL, Killed, train_small


def test_other_numbers_have_another_checksum(digits):
    other = dataclasses.replace(digits, train_y=digits.train_y.flip(0))
    assert digits.checksum == load("digits").checksum != other.checksum


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


def test_every_way_runs_were_trained_is_noted_once(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    for _ in range(2):
        add_manifest(path, CPU)
    assert len(read_list(path)) == 1
    monkeypatch.setattr(files, "_find_revision", lambda: "another")
    add_manifest(path, CPU)
    assert [one["revision"] == "another" for one in read_list(path)] == [False, True]
    path.write_text('{"revision": null}')
    with pytest.raises(PathError, match="expected a list"):
        add_manifest(path, CPU)
    assert read_list(tmp_path / "never noted") == []


class Trap:
    """Unpickled, it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_files_that_were_meddled_with_are_not_believed_and_run_nothing(training_data, tmp_path):
    expected, _ = train_small(SMALL, training_data, tmp_path)
    folder = RunFolder(tmp_path, SMALL)
    folder.metrics.write_bytes(folder.metrics.read_bytes().replace(b"1", b"2", 1))
    assert folder.find_record() is None
    assert train_small(SMALL, training_data, tmp_path)[0] == expected
    folder.result.write_text("{")
    assert train_small(SMALL, training_data, tmp_path)[0] == expected
    folder.result.unlink()
    for content in (pickle.dumps(Trap(tmp_path / "sprung")), b"", b"PK\x03\x04 broken"):
        folder.checkpoint.write_bytes(content)
        folder.result.unlink(missing_ok=True)
        assert train_small(SMALL, training_data, tmp_path)[0] == expected
    assert not (tmp_path / "sprung").exists()


def test_a_checkpoint_is_believed_whole_and_in_its_place_or_not_at_all(training_data, tmp_path):
    expected, _ = train_small(SMALL, training_data, tmp_path / "whole")
    other = dataclasses.replace(SMALL, step_size=0.2)
    for config in (SMALL, other):
        with pytest.raises(Killed):
            train_small(config, training_data, tmp_path, kill_at=3)
    folder = RunFolder(tmp_path, SMALL)
    content, metrics = folder.checkpoint.read_bytes(), folder.metrics.read_bytes()
    (whole, _) = folder.load()
    generator = torch.Generator().manual_seed(0)
    believed = 0
    for place in torch.randint(len(content), (40,), generator=generator).tolist():
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        folder.checkpoint.write_bytes(flipped)
        saved = folder.load()
        believed += saved is not None
        if saved is not None:  # a bit that nothing reads, such as padding
            for part in ("model", "order", "drops"):
                torch.testing.assert_close(saved[0][part], whole[part], rtol=0, atol=0)
    assert believed < 25
    folder.checkpoint.write_bytes(RunFolder(tmp_path, other).checkpoint.read_bytes())
    assert folder.load() is None
    folder.checkpoint.write_bytes(content)
    folder.metrics.write_bytes(metrics.replace(b"1", b"2", 1))
    assert folder.load() is None
    (folder.path / ".checkpoint.pt.tmp").write_bytes(b"half")
    assert train_small(SMALL, training_data, tmp_path)[0] == expected
    assert {path.name for path in folder.path.iterdir()} == {"config.json", "metrics.jsonl", "result.json"}


def test_a_finished_run_is_tied_to_its_folder(training_data, tmp_path):
    train_small(SMALL, training_data, tmp_path)
    folder = RunFolder(tmp_path, SMALL)
    for name, old, new in (("config.json", "0.1", "5.0"), ("result.json", "done", "diverged")):
        path = folder.path / name
        content = path.read_text()
        assert old in content
        path.write_text(content.replace(old, new))
        assert folder.find_record() is None
        path.write_text(content)
    assert folder.find_record() is not None
    folder.path.rename(tmp_path / dataclasses.replace(SMALL, method="sgd").name)
    assert RunFolder(tmp_path, dataclasses.replace(SMALL, method="sgd")).find_record() is None
