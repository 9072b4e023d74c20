"""A write leaves the new file complete or the old one unchanged."""

import os

import pytest

from covon_avalanche.atomic_write import write_atomically


def test_permissions_are_kept_and_no_name_is_prepared_for(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    path.chmod(0o640)
    names = []
    monkeypatch.setattr(os, "fsync", lambda _: names.extend(p.name for p in tmp_path.iterdir()))
    for _ in range(2):
        write_atomically(path, "new")
    assert path.stat().st_mode & 0o777 == 0o640
    assert len({*names}) == 3


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode  # as readable as any file
    plain.unlink()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    assert path.read_text() == "old"
