"""Archives are unpacked completely or not at all, and never outside the folder."""

import stat
import zipfile

import pytest

from covon_avalanche.datasets.download import DataError
from covon_avalanche.datasets.unpack import unpack


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def archive(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for member, content in members.items():
            packed.writestr(member, content)
    return path


def test_what_a_killed_process_left_is_removed(tmp_path):
    file = archive(tmp_path / "a.zip", {"clipart/axe/1.jpg": b"x"})
    half = tmp_path / "out" / ".unpacking-abc" / "clipart"
    half.mkdir(parents=True)
    (half / "1.jpg").write_bytes(b"half of it")
    unpack(file, tmp_path / "out")
    assert names(tmp_path / "out") == ["clipart"]


def test_an_archive_is_unpacked_over_older_files(tmp_path):
    file = archive(tmp_path / "a.zip", {"clipart/axe/1.jpg": b"new", "clipart/bat/2.jpg": b"x"})
    target = tmp_path / "out"
    (target / "clipart/axe").mkdir(parents=True)
    (target / "clipart/axe/1.jpg").write_bytes(b"old")
    (target / "clipart/axe/mine.jpg").write_bytes(b"kept")
    unpack(file, target)
    found = {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert found == {
        "clipart/axe/1.jpg": b"new",
        "clipart/axe/mine.jpg": b"kept",
        "clipart/bat/2.jpg": b"x",
    }


@pytest.mark.parametrize("name", ["../out.txt", "/etc/out.txt", "a/../../out.txt"])
def test_nothing_is_written_outside_the_folder(tmp_path, name):
    unpack(archive(tmp_path / "a.zip", {name: b"x"}), tmp_path / "in" / "out")
    assert names(tmp_path) == ["a.zip", "in"]
    assert names(tmp_path / "in") == ["out"]
    (file,) = (p for p in (tmp_path / "in" / "out").rglob("*") if p.is_file())
    assert file.name == "out.txt"


def test_links_become_files(tmp_path):
    member = zipfile.ZipInfo("a/link")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    unpack(archive(tmp_path / "a.zip", {member: b"/etc/passwd"}), tmp_path / "out")
    assert not (tmp_path / "out/a/link").is_symlink()
    assert (tmp_path / "out/a/link").read_bytes() == b"/etc/passwd"


def test_archives_that_would_fill_the_disk_are_refused(tmp_path):
    file = archive(tmp_path / "bomb.zip", {"good.jpg": b"x", "bomb": bytes(50_000_000)})
    with pytest.raises(DataError, match="which is too much"):
        unpack(file, tmp_path / "out")
    assert names(tmp_path / "out") == []


def test_encrypted_archives_leave_nothing(tmp_path):
    file = archive(tmp_path / "secret.zip", {"good.jpg": b"x", "secret.jpg": b"x"})
    data = bytearray(file.read_bytes())
    for header, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        data[data.rindex(header) + offset] |= 0x1  # the flags of the last member
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"secret.zip is damaged or encrypted: .*secret.jpg"):
        unpack(file, tmp_path / "out")
    assert names(tmp_path / "out") == []


def test_damaged_archives_leave_nothing(tmp_path):
    file = archive(tmp_path / "a.zip", {f"{i}.jpg": bytes(range(256)) * 40 for i in range(20)})
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 0xFF
    file.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"a.zip is damaged"):
        unpack(file, tmp_path / "out")
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(DataError, match=r"text.zip is damaged"):
        unpack(tmp_path / "text.zip", tmp_path / "out")
    assert names(tmp_path / "out") == []
