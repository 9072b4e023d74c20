"""DomainFolders: three layouts with one table of classes."""

import re

import pytest
from miniature import OWN_CLASSES, OWN_CODES, check_labels, open_stream, own, paint

from covon_avalanche.streams import DomainFolders


@pytest.mark.parametrize("layout", ["plain", "split", "csv"])
def test_own_folders_share_one_class_table(tmp_path, layout):
    benchmark = open_stream(DomainFolders, own(tmp_path, layout))
    check_labels(benchmark, OWN_CODES)
    assert benchmark.classes == OWN_CLASSES
    assert [len(e.dataset) for e in benchmark.train_stream] == [16, 16]
    assert [len(e.dataset) for e in benchmark.test_stream] == [4, 4]
    assert benchmark.train_stream[1].classes_in_this_experience == {1, 2}


@pytest.mark.parametrize("layout", ["plain", "split", "csv"])
def test_classes_are_those_of_which_the_chosen_domains_have_images(tmp_path, layout):
    root = own(tmp_path, layout)
    if layout != "csv":
        for empty in ("ant", "train/ant") if layout == "split" else ("ant",):
            (root / "other" / empty / "nothing").mkdir(parents=True)
        part = "train" if layout == "split" else ""
        (root / "night" / part / "bat").mkdir()
    assert DomainFolders(root, domains=["night"]).classes == ["dog", "fox"]
    every = open_stream(DomainFolders, root, domains=["night"], classes=OWN_CLASSES)
    check_labels(every, OWN_CODES)
    assert every.classes == OWN_CLASSES


@pytest.mark.parametrize("name", ["val", "valid"])
def test_own_folders_may_be_tested_on_what_is_called_validation(tmp_path, name):
    root = own(tmp_path, "split")
    (root / "day" / "test").rename(root / "day" / name)
    paint(root / "night" / name / "fox" / "decoy.png", 9)  # not used beside test
    benchmark = open_stream(DomainFolders, root)
    check_labels(benchmark, OWN_CODES)
    assert [len(e.dataset) for e in benchmark.test_stream] == [4, 4]


@pytest.mark.parametrize(
    "folders", [["train"], ["test"], ["val", "valid", "train"], ["train", "test", "cat"]]
)
def test_ambiguous_folders_are_refused(tmp_path, folders):
    root = own(tmp_path, "split")
    for name in folders:
        paint(root / "dusk" / name / "cat" / "0.png", 0)
        paint(root / "dusk" / name / "0.png", 0)
    message = f"dusk has the folders {sorted(folders)}: expected train with test, val or valid"
    with pytest.raises(ValueError, match=re.escape(message)):
        DomainFolders(root)


def test_a_class_may_be_called_like_a_split_if_it_is_named(tmp_path):
    for i in range(5):
        paint(tmp_path / "day" / "bus" / f"{i}.png", 0)
        paint(tmp_path / "day" / "train" / f"{i}.png", 1)
    with pytest.raises(ValueError, match=r"day has the folders \['bus', 'train'\]"):
        DomainFolders(tmp_path)
    check_labels(open_stream(DomainFolders, tmp_path, classes=["bus", "train"]), {"day": 0})


def test_the_cache_and_archive_metadata_are_not_domains(tmp_path):
    root = own(tmp_path / "pics", "plain")
    (root / "__MACOSX" / "day" / "cat").mkdir(parents=True)
    (root / "day" / "__MACOSX").mkdir()
    for _ in range(2):
        benchmark = DomainFolders(root, cache=root / "day" / ".." / "cache")
        assert list(benchmark.images["train"]) == ["day", "night"]
        assert benchmark.classes == OWN_CLASSES
    assert list((root / "cache").glob("*.pixels"))


def test_errors_name_the_value_and_the_rule(tmp_path):
    root = own(tmp_path / "good", "plain")
    for options, message in (
        ({"validation_size": 1.0}, r"validation_size must be a fraction in \[0, 1\), got 1.0"),
        ({"limit": 0}, "^limit must be an integer >= 1, got 0"),
        ({"train_limit": 0}, "^train_limit must be an integer >= 1, got 0"),
        ({"cache_size": 0}, "cache_size must be an integer >= 1, got 0"),
        ({"domains": ["dawn"]}, r"has the domains \['day', 'night'\], got \['dawn'\]"),
        ({"domains": ["day", "day"]}, "domains must be distinct"),
        ({"domains": "ab"}, "domains must be a list of names, got 'ab'"),
        ({"classes": ["cat", "dog", "fox", "cat"]}, "classes must be a list of distinct names"),
        ({"classes": ["cat", "dog"]}, r"not classes: \['fox'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            DomainFolders(root, **options)
    with pytest.raises(ValueError, match="there is no folder"):
        DomainFolders(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there are no domains in"):
        DomainFolders(tmp_path / "empty")
    (tmp_path / "empty" / "day" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match="domain 'day' has no images for the 'train' stream"):
        DomainFolders(tmp_path / "empty")


def test_an_image_is_for_training_or_for_testing(tmp_path):
    table = own(tmp_path, "csv")
    table.write_text(table.read_text() + "day/cat/0.png,night,cat,train\n")
    file = tmp_path / "day" / "cat" / "0.png"
    with pytest.raises(ValueError, match=f"^{file} is a training image and a test image$"):
        DomainFolders(table)
