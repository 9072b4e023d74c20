"""Every damaged or missing image is named; the manifest makes the same benchmark."""

from pathlib import Path

import pytest
from miniature import cddb, domainnet, open_stream, pacs, paint

from covon_avalanche.datasets.verify import COLUMNS, verify, write_manifest
from covon_avalanche.domain_orders import COUNTS
from covon_avalanche.streams import CDDB, PACS, DomainFolders, DomainNet

OPTIONS = {"domains": ["photo", "sketch"]}


def test_a_whole_data_set_has_no_problems(tmp_path, monkeypatch):
    root = pacs(tmp_path)
    assert verify(PACS, root, **OPTIONS).problems == [
        "PACS's photo should have 1670 images, found 70",
        "PACS's sketch should have 3929 images, found 70",
    ]
    monkeypatch.setitem(COUNTS, "PACS", {"photo": 70, "sketch": 70})
    report = verify(PACS, root, **OPTIONS)
    assert report.problems == []
    assert len(report.images) == 140
    assert report.images["sha256"].nunique() == 14  # one picture a class and domain


def test_each_problem_is_named(tmp_path):
    root = domainnet(tmp_path, "lists")
    axe = root / "clipart" / "axe"
    (axe / "clipart_train_11.jpg").unlink()
    (axe / "clipart_test_11.jpg").write_bytes(b"")
    broken = root / "clipart" / "bat" / "clipart_train_20.jpg"
    broken.write_bytes(broken.read_bytes()[:40])
    report = verify(DomainNet, root, domains=["clipart"])
    found = "\n".join(report.problems)
    assert "clipart should have (33525, 14604)" in found
    assert "clipart_train_11.jpg: is missing" in found
    assert "clipart_test_11.jpg: is empty" in found
    assert "clipart_train_20.jpg: cannot be decoded" in found
    assert len(report.problems) == 4


def test_a_manifest_makes_the_same_benchmark(tmp_path):
    root = pacs(tmp_path / "PACS")
    (root / "photo" / "dog" / "0.jpg").write_bytes(b"")
    write_manifest(verify(PACS, root, **OPTIONS), tmp_path / "pacs.csv")
    lines = (tmp_path / "pacs.csv").read_text().splitlines()
    assert lines[0] == "# covon_avalanche manifest, version 2"
    assert lines[1].startswith('# classes: ["dog", "elephant", ')
    assert lines[2] == ",".join(COLUMNS)
    again = DomainFolders(tmp_path / "pacs.csv")
    original = open_stream(PACS, root, **OPTIONS)
    assert again.classes == original.classes
    for stream in ("train", "test"):
        for domain, images in original.images[stream].items():
            files = [f.resolve() for f in images.files if f.stat().st_size]
            assert [f.resolve() for f in again.images[stream][domain].files] == files


def test_names_that_are_not_utf_8_survive_in_a_manifest(tmp_path):
    for domain in ("day", "caf\udce9"):  # the byte of é in Latin-1
        for i in range(5):
            paint(tmp_path / "pics" / domain / "ch\udce2t" / f"{i}.png", i)
            name = tmp_path / "pics" / domain / "ch\udce2t" / f"\udcff {i}.png"
            name.with_name(f"{i}.png").rename(name)
    write_manifest(verify(DomainFolders, tmp_path / "pics"), tmp_path / "a.csv")
    (tmp_path / "a.csv").read_text(encoding="utf-8")
    original, again = DomainFolders(tmp_path / "pics"), DomainFolders(tmp_path / "a.csv")
    assert again.classes == original.classes == [r"ch\udce2t"]
    for stream, domains in original.images.items():
        found = {domain: images.files for domain, images in again.images[stream].items()}
        assert found == {domain: images.files for domain, images in domains.items()}


def test_a_manifest_keeps_class_ids(tmp_path):
    """In an order that is not alphabetical, and of classes that a domain lacks."""
    file = tmp_path / "a.csv"
    domains = list(cddb(tmp_path / "CDDB"))
    write_manifest(verify(CDDB, tmp_path / "CDDB", track="easy", domains=domains), file)
    assert DomainFolders(file).classes == ["real", "fake"]
    assert DomainFolders(file, classes=["fake", "real"]).classes == ["fake", "real"]
    root = domainnet(tmp_path / "domainnet", "lists")
    write_manifest(verify(DomainNet, root, domains=["painting"]), file)
    painting = DomainFolders(file)
    assert painting.n_classes == 345
    assert 327 not in painting.images["train"]["painting"].labels
    assert 328 in painting.images["train"]["painting"].labels


@pytest.mark.parametrize("place", ["data", "link"])
def test_a_manifest_below_a_linked_folder_finds_its_images(tmp_path, monkeypatch, place):
    (tmp_path / "deep" / "down").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "down")
    pacs(tmp_path / place)
    monkeypatch.chdir(tmp_path)
    write_manifest(verify(PACS, Path(place), **OPTIONS), tmp_path / "link" / "pacs.csv")
    images = DomainFolders("link/pacs.csv").images["train"]["photo"]
    assert all(file.is_file() for file in images.files)
    if place == "link":  # with the table
        (tmp_path / "deep").rename(tmp_path / "elsewhere")
        again = DomainFolders(tmp_path / "elsewhere" / "down" / "pacs.csv")
        assert all(file.is_file() for file in again.images["train"]["photo"].files)
