"""``covon data`` as a user calls it."""

import csv
import hashlib
import io
import itertools
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from data_server import serve
from miniature import own, pacs, paint
from small_recipes import NETWORK, saved, short_recipe
from terminal import covon, refused

from covon_avalanche.cli import data as cli_data
from covon_avalanche.datasets.catalogue import DataSet, RemoteFile
from covon_avalanche.datasets.download import download
from covon_avalanche.domain_orders import TRACKS


@pytest.fixture
def pictures(monkeypatch):
    """A catalogue with one data set, on a local server."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("photo/dog/1.jpg", b"a picture")
    data = buffer.getvalue()
    with serve() as (address, files):
        files.content = {"/a.zip": data, "/list.txt": b"photo/dog/1.jpg 0\n"}
        remote = tuple(
            RemoteFile(address + path, len(content), hashlib.md5(content).hexdigest())
            for path, content in files.content.items()
        )
        known = {"Pictures": DataSet("Pictures", "pictures", "for tests", remote)}
        monkeypatch.setattr(cli_data, "CATALOGUE", known)
        yield files


def test_download_fetches_unpacks_and_does_nothing_the_second_time(pictures, tmp_path):
    for _ in range(2):
        covon("data", "download", "Pictures", "--root", tmp_path)
    folder = tmp_path / "pictures"
    assert (folder / "photo/dog/1.jpg").read_bytes() == b"a picture"
    found = sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")
    assert found == [".a.zip.unpacked", "list.txt", "photo"]
    assert len(pictures.asked) == 2


def test_an_interrupted_unpacking_is_repeated(pictures, tmp_path, monkeypatch):
    command = "data", "download", "Pictures", "--root", tmp_path
    image = tmp_path / "pictures/photo/dog/1.jpg"

    def half(*_):
        image.parent.mkdir(parents=True)
        image.write_bytes(b"a pic")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cli_data, "unpack", half)
        covon(*command, status=130)
    covon(*command)
    assert image.read_bytes() == b"a picture"


def test_an_archive_that_a_kill_has_left_is_removed(pictures, tmp_path, monkeypatch):
    command = "data", "download", "Pictures", "--root", tmp_path
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", lambda self, **_: (_ for _ in ()).throw(SystemExit(9)))
        covon(*command, status=9)
    assert (tmp_path / "pictures/a.zip").exists()
    covon(*command)
    assert not (tmp_path / "pictures/a.zip").exists()
    assert (tmp_path / "pictures/list.txt").exists()


def test_one_of_two_concurrent_downloads_waits(pictures, tmp_path, monkeypatch):
    def slow(*arguments, **options):
        time.sleep(0.05)
        return download(*arguments, **options)

    monkeypatch.setattr(cli_data, "download", slow)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(cli_data.download_data, "Pictures", tmp_path) for _ in range(2)]
    assert [done.exception() for done in both] == [None, None]
    assert sorted(path for path, _ in pictures.asked) == ["/a.zip", "/list.txt"]


def test_a_failing_download_is_one_sentence_and_status_2(pictures, tmp_path):
    pictures.content["/a.zip"] += b"more"
    refused("data", "download", "Pictures", "--root", tmp_path)


def test_data_sets_are_listed_with_how_to_get_them_by_hand(tmp_path):
    names = ["DomainNet", "CORe50", "CDDB", "PACS", "OfficeHome", "ImageNetR"]
    listed = covon("data", "list").stdout.splitlines()
    assert [line.partition(": ")[0] for line in listed] == names
    folders = {"PACS": "PACS/photo/dog", "OfficeHome": "OfficeHome/Art/Alarm_Clock"}
    for name, folder in (folders | {"ImageNetR": "imagenet-r/n01443537"}).items():
        sentence = refused("data", "download", name, "--root", tmp_path)
        assert f"unpack it so that {folder} exists" in sentence
    sentence = refused("data", "verify", "MNIST", "--root", tmp_path)
    assert f"known are {', '.join(names)}" in sentence


def easy_cddb(root):
    """Of the track whose numbers of images nobody has published."""
    for domain in TRACKS["easy"]:
        for part, name in itertools.product(("train", "val"), ("0_real", "1_fake")):
            paint(root / "CDDB" / domain / part / name / "0.png", 0)
    stream = {"name": "CDDB", "track": "easy"}
    recipe = saved(short_recipe("finetune", stream=stream, model=NETWORK), root)
    return "data", "verify", recipe, "--root", root


def test_verify_shows_its_progress_in_a_terminal(tmp_path, monkeypatch):
    arguments = easy_cddb(tmp_path)
    assert covon(*arguments).stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("COLUMNS", "300")
    assert "28/28" in covon(*arguments).stderr


def test_verify_names_problems_and_writes_a_manifest_of_good_images(tmp_path):
    arguments = (*easy_cddb(tmp_path), "--manifest", tmp_path / "cddb.csv")
    done = covon(*arguments)
    assert done.stdout == f"{arguments[2]}: 28 good images, 0 problems\n"
    (tmp_path / "CDDB/wild/train/0_real/0.png").write_bytes(b"damaged")
    done = covon(*arguments, status=1)
    assert "wild/train/0_real/0.png: cannot be decoded: its format is unknown\n" in done.stdout
    assert ": 27 good images, 1 problem\n" in done.stdout
    assert len((tmp_path / "cddb.csv").read_text().splitlines()) == 3 + 27
    sentence = refused(*arguments, "--manifest", tmp_path / "cddb.csv/a.csv")
    assert sentence == f"covon: cannot read or write {tmp_path}/cddb.csv: File exists"


def test_own_images_are_verified_and_counted_before_training(tmp_path):
    own(tmp_path / "mine", "flat")
    images = sorted((tmp_path / "mine").rglob("*.png"))
    stream = {"name": "DomainFolders", "folder": "mine", "domains": ["night", "day"], "limit": 1}
    recipe = saved(short_recipe("finetune", stream=stream, model=NETWORK), tmp_path)
    command = "data", "verify", recipe, "--dataset-root", tmp_path
    done = covon(*command)  # all images, not only those within the limit
    assert done.stdout == f"{recipe}: {len(images)} good images, 0 problems\n"
    damaged = images[0]
    damaged.write_bytes(b"damaged")
    done = covon(*command, status=1)
    assert f"{damaged}: cannot be decoded" in done.stdout
    damaged.unlink()
    changes = "--set", "stream.limit=2", "--set", "train_mb_size=4"
    done = covon("run", recipe, "--dataset-root", tmp_path, "--dry-run", *changes)
    lines = done.stdout.splitlines()
    assert "The data are there: 2 domains, 3 classes, images: 8 train, 8 test." in lines
    assert "night has no images of cat (train)." in lines
    assert "day has no images of fox (test)." in lines


def test_the_images_of_a_recipe_are_listed_with_their_split(tmp_path):
    own(tmp_path / "mine", "split")
    image = tmp_path / "mine/day/test/cat/1.png"
    image.rename(image.with_name("\udce9.png"))  # not UTF-8
    stream = {"name": "DomainFolders", "folder": "mine", "domains": ["night", "day"], "limit": 1,
              "validation_size": 0.5, "cache_size": 8}  # fmt: skip
    recipe = saved(short_recipe("finetune", stream=stream, model=NETWORK), tmp_path)
    command = "data", "list", recipe, "--dataset-root", tmp_path
    seen = set()
    for split in ("train", "valid", "test"):
        done = covon(*command, "--split", split, "--set", "seeds=[3]")
        rows = list(csv.DictReader(io.StringIO(done.stdout)))
        assert [*rows[0]] == ["domain", "class", "split", "path"]
        assert [row["domain"] for row in rows] == ["night", "night", "day", "day"]  # one a class
        for row in rows:
            part = "test" if split == "test" else "train"
            assert row["split"] == split
            assert row["path"].startswith(f"mine/{row['domain']}/{part}/{row['class']}/")
            assert "\\udce9" in row["path"] or (tmp_path / row["path"]).is_file()
        seen |= {row["path"] for row in rows}
    assert len(seen) == 12
    assert not (tmp_path / "cache").exists()
    assert covon(*command).stdout.count(",test,") == 4
    done = covon(*command, "--set", "stream.limit=9")
    assert "mine/day/test/cat/\\udce9.png\n" in done.stdout


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_listed_is_one_sentence(tmp_path):
    pacs(tmp_path / "PACS")
    for arguments, sentence in (
        (("permuted-digits",), "PermutedDigits has no image files to list"),
        (
            ("pacs", "--split", "x", "--set", "stream.domains=['photo']"),
            "--split must be one of train, test, valid, got x",
        ),
        (("pacs", "--dataset-root", tmp_path / "PACS"), "the data are missing: there is no"),
        (("pac",), "there is no recipe 'pac'"),
        (("pacs", "--set", "stream.domains=['cartoon']"), "there is no folder"),
    ):
        assert sentence in refused("data", "list", "--dataset-root", tmp_path, *arguments)
