"""Downloads from a local server that breaks off and reports errors."""

import hashlib

import pytest
from data_server import serve

from covon_avalanche.datasets.catalogue import RemoteFile
from covon_avalanche.datasets.download import DataError, download

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


def test_refusals_are_one_sentence(server, tmp_path):
    address, _ = server
    with pytest.raises(DataError, match="the server says 404"):
        download(RemoteFile(f"{address}/missing.zip"), tmp_path)
    with pytest.raises(DataError, match="neither http nor https"):
        download(RemoteFile("file:///etc/passwd"), tmp_path)
    with pytest.raises(DataError, match=r"the connection failed 1 times"):
        download(RemoteFile("http://127.0.0.1:9/x"), tmp_path, attempts=1)
