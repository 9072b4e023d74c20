"""A write leaves the new file complete or the old one unchanged."""

import errno
import os
import time

import pytest
import torch
from safetensors.torch import save_file

from covon_avalanche.atomic_write import atomic_replace, write_atomically
from covon_avalanche.posterior import DiagGaussian


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


def test_files_of_other_writers_are_as_readable_as_any(tmp_path):
    (tmp_path / "plain").write_text("")
    with atomic_replace(tmp_path / "weights.safetensors") as part:
        save_file({"w": torch.zeros(1)}, part)
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def gaussian(path, text):
    DiagGaussian({text: torch.zeros(1)}, {text: torch.ones(1)}).save(path)


@pytest.mark.parametrize("write", [write_atomically, gaussian])
def test_a_failed_write_leaves_the_old_file(write, tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write(path, "old")
    before = path.read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    assert path.read_bytes() == before


def test_what_kills_have_left_is_removed_an_hour_later(tmp_path):
    names = [".a[1].0123456789abcdef.part", ".a[1].fedcba9876543210.part"]
    others = [".b.0123456789abcdef.part", ".a1.0123456789abcdef.part", ".a[1].part"]
    for name in [*names, *others]:
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (0, time.time() - (30 if name == names[1] else 4000)))
    write_atomically(tmp_path / "a[1]", "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, names[1], "a[1]"])


def test_an_error_names_the_file_that_was_to_be_written(tmp_path):
    path = tmp_path / ("a" * 250)  # the temporary file's name is too long
    with pytest.raises(OSError, match="too long") as raised:
        write_atomically(path, "")
    assert raised.value.filename == str(path)


def test_an_error_of_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*result\.json'"):
        write_atomically(tmp_path / "result.json", "")
    assert not [*tmp_path.iterdir()]
