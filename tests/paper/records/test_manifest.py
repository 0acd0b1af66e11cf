"""Where runs were trained is recorded."""

from __future__ import annotations

import pytest

from pathsgd.errors import PathError
from pathsgd.paper.records.manifest import add_manifest, make_manifest, read_manifests
from support.short_runs import CPU


def test_every_way_runs_were_trained_is_noted_once(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    for _ in range(2):
        add_manifest(path, make_manifest(CPU))
    assert len(read_manifests(path)) == 1
    monkeypatch.setattr("pathsgd.paper.records.manifest._revision", lambda: "another")
    add_manifest(path, make_manifest(CPU))
    assert [one["revision"] == "another" for one in read_manifests(path)] == [False, True]
    for damaged, said in (('{"revision": null}', "expected a list"), ('[{"x": NaN}]', "NaN is not JSON")):
        path.write_text(damaged)
        with pytest.raises(PathError, match=said):
            add_manifest(path, make_manifest(CPU))
    assert read_manifests(tmp_path / "never noted") == []
