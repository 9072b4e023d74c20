"""Downloads from a local server that breaks off, lies and sends hostile archives."""

import hashlib
import shutil
import stat
import zipfile

import pytest
from data_server import serve

from covon_avalanche.datasets.catalogue import CATALOGUE, RemoteFile
from covon_avalanche.datasets.download import DataError, download
from covon_avalanche.datasets.unpack import unpack

DATA = bytes(range(256)) * 8000  # about 2 MB


@pytest.fixture
def server():
    with serve() as (address, files):
        files.content["/data.bin"] = DATA
        yield address, files


def remote(address, *, size=len(DATA), md5=None):
    digest = hashlib.md5(DATA).hexdigest() if md5 is None else md5
    return RemoteFile(f"{address}/data.bin", size, digest)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_file_arrives_once(server, tmp_path):
    address, files = server
    seen = []
    path = download(remote(address), tmp_path / "new", progress=seen.append)
    assert path.read_bytes() == DATA
    assert seen[-1] == len(DATA)
    assert download(remote(address), tmp_path / "new") == path
    assert len(files.asked) == 1
    assert names(tmp_path / "new") == ["data.bin"]


def test_a_broken_connection_goes_on_from_where_it_broke(server, tmp_path):
    address, files = server
    files.break_after = [500_000, 700_000]
    path = download(remote(address), tmp_path, pause=0.01)
    assert path.read_bytes() == DATA
    ranges = [wanted for _, wanted in files.asked]
    assert ranges[0] is None
    assert [int(r[6:-1]) for r in ranges[1:]] == [500_000, 1_200_000]


def test_the_next_call_goes_on_where_the_last_one_gave_up(server, tmp_path):
    address, files = server
    files.break_after = [500_000, 0]
    with pytest.raises(DataError, match=r"data.bin: the connection failed 2 times ..*to resume"):
        download(remote(address), tmp_path, attempts=2, pause=0.01)
    assert names(tmp_path) == [".data.bin.part"]
    download(remote(address), tmp_path)
    assert files.asked[-1][1] == "bytes=500000-"
    assert names(tmp_path) == ["data.bin"]


def test_a_server_without_ranges_starts_anew(server, tmp_path):
    address, files = server
    files.ranges = False
    files.break_after = [500_000]
    assert download(remote(address), tmp_path, pause=0.01).read_bytes() == DATA


@pytest.mark.parametrize(
    ("part", "tells_size", "requests"),
    [
        (DATA, True, 1),  # all had arrived when the process was killed
        (DATA, False, 2),
        (DATA + b"more", True, 2),  # of another version
    ],
)
def test_a_range_after_the_end_is_the_whole_file_or_starts_anew(
    server, tmp_path, part, tells_size, requests
):
    address, files = server
    files.tells_size = tells_size
    (tmp_path / ".data.bin.part").write_bytes(part)
    path = download(RemoteFile(f"{address}/data.bin"), tmp_path)
    assert path.read_bytes() == DATA
    assert len(files.asked) == requests
    assert names(tmp_path) == ["data.bin"]


def test_an_error_of_the_server_is_tried_again(server, tmp_path):
    address, files = server
    files.errors = [503, 500]
    assert download(remote(address), tmp_path, pause=0.01).read_bytes() == DATA
    (tmp_path / "data.bin").unlink()
    files.errors = [503, 503]
    with pytest.raises(DataError, match=r"failed 2 times \(HTTP Error 503"):
        download(remote(address), tmp_path, attempts=2, pause=0.01)


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    address, _ = server
    with pytest.raises(DataError, match=r"has the md5 .* instead of 0000: it is damaged"):
        download(remote(address, md5="0000"), tmp_path)
    assert names(tmp_path) == []


def test_a_wrong_size_and_a_wrong_older_file_are_said(server, tmp_path):
    address, _ = server
    with pytest.raises(DataError, match=r"has \d+ bytes instead of 10"):
        download(remote(address, size=10), tmp_path)
    (tmp_path / "data.bin").write_bytes(b"old")
    with pytest.raises(DataError, match=r"has 3 bytes instead of .*: remove it"):
        download(remote(address), tmp_path)


def test_refusals_are_one_sentence(server, tmp_path, monkeypatch):
    address, _ = server
    with pytest.raises(DataError, match="the server says 404"):
        download(RemoteFile(f"{address}/missing.zip"), tmp_path)
    with pytest.raises(DataError, match="neither http nor https"):
        download(RemoteFile("file:///etc/passwd"), tmp_path)
    with pytest.raises(DataError, match=r"the connection failed 1 times"):
        download(RemoteFile("http://127.0.0.1:9/x"), tmp_path, attempts=1)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=r"needs 0.3 GB of free disk, has 0.0"):
        download(remote(address), tmp_path)


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


def test_archives_that_would_fill_the_disk_are_refused(tmp_path, monkeypatch):
    file = archive(tmp_path / "bomb.zip", {"good.jpg": b"x", "bomb": bytes(50_000_000)})
    with pytest.raises(DataError, match="which is too much"):
        unpack(file, tmp_path / "out")
    file = archive(tmp_path / "good.zip", {"good.jpg": b"x"})
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=r"needs 0.3 GB of free disk, has 0.0"):
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


def test_the_catalogue_is_complete_where_it_can_be():
    domainnet = CATALOGUE["DomainNet"].files
    assert len(domainnet) == 18
    assert len({file.md5 for file in domainnet}) == 18
    assert all(file.size and len(file.md5) == 32 for file in domainnet)
    for dataset in CATALOGUE.values():
        assert dataset.files or "unpack it so that" in dataset.note
