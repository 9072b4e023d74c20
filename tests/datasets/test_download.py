"""Downloads from a local server that breaks off and reports errors; unpacking of archives."""

import hashlib
import stat
import zipfile

import pytest
from data_server import serve

from covon_avalanche.datasets.catalogue import RemoteFile
from covon_avalanche.datasets.download import download, unpack

DATA = bytes(range(256)) * 8000  # about 2 MB
MD5 = hashlib.md5(DATA).hexdigest()


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def server():
    with serve() as (address, files):
        files.content["/data.bin"] = DATA
        yield files, RemoteFile(f"{address}/data.bin", len(DATA), MD5)


def test_a_file_arrives_once(server, tmp_path):
    files, remote = server
    seen = []
    path = download(remote, tmp_path / "new", progress=seen.append)
    assert path.read_bytes() == DATA
    assert seen[-1] == len(DATA)
    assert download(remote, tmp_path / "new") == path
    assert len(files.asked) == 1
    assert names(tmp_path / "new") == ["data.bin"]
    path.write_bytes(b"of an older version")
    assert download(remote, tmp_path / "new").read_bytes() == DATA


def test_broken_connections_are_resumed_where_they_broke(server, tmp_path):
    """By the same call, and by the next one."""
    files, remote = server
    files.break_after = [500_000, 700_000, 0]
    with pytest.raises(ValueError, match=r"data.bin: interrupted after 1200000 of .*to resume"):
        download(remote, tmp_path, attempts=3, pause=0.01)
    assert names(tmp_path) == [".data.bin.part"]
    assert download(remote, tmp_path).read_bytes() == DATA
    ranges = [f"bytes={received}-" for received in (0, 500_000, 1_200_000, 1_200_000)]
    assert [wanted for _, wanted in files.asked] == ranges
    assert names(tmp_path) == ["data.bin"]


def test_a_server_without_ranges_starts_from_the_beginning(server, tmp_path):
    files, remote = server
    files.ranges = False
    files.break_after = [500_000]
    assert download(remote, tmp_path, pause=0.01).read_bytes() == DATA


def test_a_download_killed_after_the_last_byte_is_complete(server, tmp_path):
    files, remote = server
    (tmp_path / ".data.bin.part").write_bytes(DATA)
    assert download(remote, tmp_path).read_bytes() == DATA
    assert not files.asked


def test_errors_of_the_server_are_tried_again_and_refusals_not(server, tmp_path):
    files, remote = server
    files.errors = [503, 500]
    assert download(remote, tmp_path, pause=0.01).read_bytes() == DATA
    files.errors = [503, 503]
    with pytest.raises(ValueError, match=r"data.bin: HTTP Error 503"):
        download(remote, tmp_path / "new", attempts=2, pause=0.01)
    missing = RemoteFile(f"{remote.url}.zip", 1, MD5)
    with pytest.raises(ValueError, match=r"data.bin.zip: HTTP Error 404"):
        download(missing, tmp_path)
    assert [path for path, _ in files.asked].count("/data.bin.zip") == 1


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    _, remote = server
    for size in (len(DATA), 10):
        with pytest.raises(ValueError, match=r"data.bin does not have the md5 0000"):
            download(RemoteFile(remote.url, size, "0000"), tmp_path)
        assert names(tmp_path) == []


def archive(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for member, content in members.items():
            packed.writestr(member, content)
    return path


def test_an_archive_is_unpacked_over_older_files(tmp_path):
    file = archive(tmp_path / "a.zip", {"clipart/axe/1.jpg": b"new", "clipart/bat/2.jpg": b"x"})
    target = tmp_path / "out"
    for name, content in (("clipart/axe/1.jpg", b"old"), ("clipart/axe/mine.jpg", b"kept")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    unpack(file, target)
    found = {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    expected = {"axe/1.jpg": b"new", "axe/mine.jpg": b"kept", "bat/2.jpg": b"x"}
    assert found == {f"clipart/{name}": content for name, content in expected.items()}


def test_nothing_is_written_outside_the_folder_and_links_become_files(tmp_path):
    link = zipfile.ZipInfo("a/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    members = {link: b"/etc/passwd", "../1.txt": b"x", "/etc/2.txt": b"x", "a/../../3.txt": b"x"}
    target = tmp_path / "in" / "out"
    unpack(archive(tmp_path / "a.zip", members), target)
    assert names(tmp_path) == ["a.zip", "in"]
    assert names(tmp_path / "in") == ["out"]
    assert sorted(p.name for p in target.rglob("*.txt")) == ["1.txt", "2.txt", "3.txt"]
    assert not (target / "a/link").is_symlink()
    assert (target / "a/link").read_bytes() == b"/etc/passwd"


def test_an_archive_that_cannot_be_unpacked_is_named(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"a.zip cannot be unpacked: File is not a zip file"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
