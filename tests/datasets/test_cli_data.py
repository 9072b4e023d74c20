"""``covon data`` as a user calls it."""

import hashlib
import io
import itertools
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from data_server import serve
from miniature import pacs, paint
from typer.testing import CliRunner

from covon_avalanche import cli
from covon_avalanche.cli import data as cli_data
from covon_avalanche.datasets.catalogue import DataSet, RemoteFile
from covon_avalanche.datasets.download import download
from covon_avalanche.domain_orders import TRACKS


def covon(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture
def pictures(monkeypatch):
    """A catalogue with one data set, on a local server."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("photo/dog/1.jpg", b"a picture")
    data = buffer.getvalue()
    with serve() as (address, files):
        files.content["/a.zip"] = data
        files.content["/list.txt"] = b"photo/dog/1.jpg 0\n"
        md5 = hashlib.md5(data).hexdigest()
        remote = (RemoteFile(f"{address}/a.zip", len(data), md5, unpack=True),)
        remote += (RemoteFile(f"{address}/list.txt"),)
        known = {"Pictures": DataSet("Pictures", "pictures", "for tests", remote)}
        monkeypatch.setattr(cli_data, "CATALOGUE", known)
        yield files


def test_download_fetches_unpacks_and_does_nothing_the_second_time(pictures, tmp_path):
    for _ in range(2):
        done = covon("data", "download", "Pictures", "--root", tmp_path)
        assert done.exit_code == 0, done.output
    folder = tmp_path / "pictures"
    assert (folder / "photo/dog/1.jpg").read_bytes() == b"a picture"
    found = sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")
    assert found == [".a.zip.unpacked", "list.txt", "photo"]
    assert len(pictures.asked) == 2


def test_of_two_downloads_at_once_one_waits(pictures, tmp_path, monkeypatch):
    busy = threading.Lock()

    def alone(*arguments, **options):
        assert busy.acquire(blocking=False)
        time.sleep(0.05)
        path = download(*arguments, **options)
        busy.release()
        return path

    monkeypatch.setattr(cli_data, "download", alone)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(cli_data.download_data, "Pictures", tmp_path) for _ in range(2)]
    assert [done.exception() for done in both] == [None, None]
    assert sorted(path for path, _ in pictures.asked) == ["/a.zip", "/list.txt"]


def test_a_failing_download_is_one_sentence_and_status_2(pictures, tmp_path):
    pictures.content["/a.zip"] += b"more"
    done = covon("data", "download", "Pictures", "--root", tmp_path)
    assert done.exit_code == 2
    assert done.stderr.startswith("covon: ")
    assert done.stderr.count("\n") == 1


def test_list_and_what_must_be_had_by_hand(tmp_path):
    listed = covon("data", "list").stdout
    assert all(name in listed for name in ("DomainNet: ", "CORe50: ", "CDDB: ", "PACS: "))
    done = covon("data", "download", "PACS", "--root", tmp_path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "unpack it so that PACS/photo/dog exists" in done.stderr
    done = covon("data", "verify", "MNIST", "--root", tmp_path)
    assert done.exit_code == 2
    assert "known are DomainNet, CORe50, CDDB, PACS" in done.stderr


def test_verify_names_problems_and_exits_with_1(tmp_path, monkeypatch):
    counts = {"photo": 70, "sketch": 70, "art_painting": 21, "cartoon": 21}
    monkeypatch.setattr("covon_avalanche.streams.pacs.COUNTS", counts)
    root = pacs(tmp_path / "PACS")
    for domain in ("art_painting", "cartoon"):
        for name in (root / "photo").iterdir():
            paint(root / domain / name.name / "1.jpg", 0)
            paint(root / domain / name.name / "2.jpg", 0)
            paint(root / domain / name.name / "3.jpg", 0)
    arguments = ("data", "verify", "PACS", "--root", tmp_path)
    done = covon(*arguments, "--manifest", tmp_path / "pacs.csv")
    assert done.exit_code == 0, done.output
    assert "PACS: 182 good images, 0 problems" in done.stdout
    assert (tmp_path / "pacs.csv").is_file()
    (root / "photo/dog/3.jpg").write_bytes(b"damaged")
    (root / "photo/dog/4.jpg").unlink()
    done = covon(*arguments)
    assert done.exit_code == 1
    assert "photo/dog/3.jpg: cannot be decoded" in done.stdout
    assert "PACS's photo should have 70 images, found 69" in done.stdout
    done = covon("data", "verify", "PACS", "--root", tmp_path / "nowhere")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


def easy_cddb(root):
    for domain in TRACKS["easy"]:
        for part, name in itertools.product(("train", "val"), ("0_real", "1_fake")):
            paint(root / "CDDB" / domain / part / name / "0.png", 0)
    return "data", "verify", "CDDB", "--root", root


def test_verify_says_how_far_it_is(tmp_path, monkeypatch):
    arguments = (*easy_cddb(tmp_path), "--track", "easy")
    assert covon(*arguments).stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    assert "28/28" in covon(*arguments).stderr


def test_verify_reads_the_tracks_of_cddb(tmp_path):
    arguments = easy_cddb(tmp_path)
    done = covon(*arguments, "--track", "easy")
    assert (done.exit_code, done.stdout) == (0, "CDDB: 28 good images, 0 problems\n")
    assert "there is no folder" in covon(*arguments).stderr
    assert (
        "track must be one of ['hard', 'easy', 'long']" in covon(*arguments, "--track", "x").stderr
    )
    done = covon("data", "verify", "PACS", "--root", tmp_path, "--track", "easy")
    assert (done.exit_code, done.stderr) == (
        2,
        "covon: --track is for CDDB alone, got easy for PACS\n",
    )
