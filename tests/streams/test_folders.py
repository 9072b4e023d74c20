"""DomainFolders: four layouts with one table of classes; all others are refused."""

import itertools
import re
import unicodedata
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from miniature import OWN, OWN_CLASSES, OWN_CODES, check_labels, open_stream, own, paint

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


def pictures(root: Path, *places: str) -> Path:
    """Five images in each of the folders, in the colours of ``OWN_CLASSES`` and ``OWN_CODES``."""
    for place in places:
        words = {name.casefold() for name in place.split("/")}
        label = next((i for i, name in enumerate(OWN_CLASSES) if name in words), 0)
        code = next((code for name, code in OWN_CODES.items() if name in words), 0)
        for i in range(5):
            paint(root / place / f"{i}{'ts'['test' in place]}.png", label, code)
    return root


@pytest.mark.parametrize(
    ("train", "test"),
    [("Train", "Test"), ("training", "testing"), ("TRAIN", "val"), ("train_set", "Validation")],
)
@pytest.mark.parametrize("outside", [True, False])
def test_splits_are_found_in_any_case_within_and_around_domains(tmp_path, train, test, outside):
    for part, number in ((train, 3), (test, 2)):
        for domain, name in (("day", "cat"), ("day", "dog"), ("night", "dog")):
            middle = (part, domain, name) if outside else (domain, part, name)
            for i in range(number):
                file = tmp_path.joinpath(*middle, f"{part}{i}.png")
                paint(file, OWN_CLASSES.index(name), OWN_CODES[domain])
    benchmark = open_stream(DomainFolders, tmp_path, domains=["night", "day"])
    check_labels(benchmark, OWN_CODES)
    assert benchmark.classes == ["cat", "dog"]
    assert [e.domain for e in benchmark.train_stream] == ["night", "day"]
    assert [len(e.dataset) for e in benchmark.train_stream] == [3, 6]
    assert [len(e.dataset) for e in benchmark.test_stream] == [2, 4]


@pytest.mark.parametrize(
    ("places", "found"),
    [
        (["train/cat", "val/cat"], "{train,test}/FOLDER/*"),
        (["Train/dog", "Test/dog", "Train/cat", "Test/cat"], "{train,test}/FOLDER/*"),
        (["day/images/cat", "night/images/dog"], "FOLDER/FOLDER/FOLDER/*"),
        (["day/cat", "night/images/dog"], "FOLDER/FOLDER/FOLDER/*"),
        (["mine/day/cat", "mine/night/dog"], "FOLDER/FOLDER/FOLDER/*"),
        (["mine/day/train/cat", "mine/day/test/cat"], "FOLDER/FOLDER/{train,test}/FOLDER/*"),
        (["mine/train/day/cat", "mine/test/day/cat"], "FOLDER/{train,test}/FOLDER/FOLDER/*"),
        (["day/cat/train", "day/cat/test"], "FOLDER/FOLDER/{train,test}/*"),
        (["cat", "dog"], "FOLDER/*"),
        (["day/train/x/cat", "day/test/x/cat"], "FOLDER/{train,test}/FOLDER/FOLDER/*"),
    ],
)
def test_other_layouts_are_refused_with_the_one_found_and_those_expected(tmp_path, places, found):
    expected = f"in the layout {found}: expected DOMAIN/CLASS/*, DOMAIN/{{train,test}}/CLASS/* or "
    with pytest.raises(ValueError, match=re.escape(expected)):
        DomainFolders(pictures(tmp_path, *places))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["train/day/cat", "day/cat"], r"has the folders \['day', 'train'\]: .* or domains alone"),
        (["day/train/cat", "day/Train/cat", "day/test/cat"], r"has the folders \['Train', 'test',"),
        (["train/day/cat", "train/dusk/cat", "test/day/cat"], r"or for testing only: \['dusk'\]"),
        (["test/cat", "day/cat"], r"or domains alone, those called like a split named in `dom"),
        (["day_train/cat", "day_test/cat"], r"'day_test', 'day_train'\], which seem to be splits"),
        (["Train-day/cat", "day/cat"], r"\['Train-day', 'day'\], .* a split named in `domains`"),
        (["day/cat.train/", "day/cat.val/"], r"\['cat.train', 'cat.val'\], .* in `classes`"),
        (["day/train/cat"], r"day has the folders \['train'\]: expected train with test, val or "),
        (["day/test/cat"], r"day has the folders \['test'\]: expected train with"),
        (["day/train/cat", "day/val/cat", "day/valid/cat"], r"\['train', 'val', 'valid'\]: expect"),
        (["day/train/cat", "day/test/cat", "day/cat"], r"\['cat', 'test', 'train'\]: expected tra"),
    ],
)
def test_splits_that_are_not_clear_are_refused(tmp_path, places, message):
    with pytest.raises(ValueError, match=message):
        DomainFolders(pictures(tmp_path, *places))


def test_what_the_user_names_is_not_guessed(tmp_path):
    root = pictures(tmp_path / "a", "test/cat", "day/cat", "day/train/dog")
    check_labels(open_stream(DomainFolders, root, domains=["test"]), {"test": 0})
    root, both = pictures(tmp_path / "c", "slow train/cat", "slow/cat"), ["slow", "slow train"]
    check_labels(open_stream(DomainFolders, root, domains=both), dict.fromkeys(both, 0))
    root = pictures(tmp_path / "b", "day/cat/more", "day/dog")
    with pytest.raises(ValueError, match="in subfolders of their class folder, pass `classes`"):
        DomainFolders(root)
    check_labels(open_stream(DomainFolders, root, classes=["cat", "dog"]), {"day": 1})


def test_names_in_two_unicode_normalisations_are_one(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    for name, i in itertools.product((composed, decomposed), range(5)):
        paint(tmp_path / "day" / name / f"{name}{i}.png", 0)
        paint(tmp_path / name / "dog" / f"{name}{i}.png", 1)
    options = {"domains": ["day", decomposed], "classes": [decomposed, "dog"]}
    for benchmark in (DomainFolders(tmp_path), DomainFolders(tmp_path, **options)):
        assert benchmark.classes == [composed, "dog"]
        assert {*benchmark.images["train"]} == {"day", composed}
        for domain in ("day", composed):
            assert [len(benchmark.images[part][domain]) for part in ("train", "test")] == [8, 2]


def test_a_domain_that_is_not_used_may_differ_in_case_only(tmp_path, recwarn):
    DomainFolders(pictures(tmp_path, "night/dog", "Night/dog"), domains=["night"])
    assert not recwarn


@pytest.mark.parametrize(
    ("places", "warning"),
    [
        (["day/dog"], None),
        (["day/Dog", "night/dog"], "the classes 'Dog' and 'dog' differ in case only"),
        (["night/dog", "Night/dog"], "the domains 'Night' and 'night' differ in case only"),
        (["day/dog", "day/dog "], "'dog' and 'dog ' differ in spaces, _, - or case only"),
        (["day/a b", "night/A_B"], "'A_B' and 'a b' differ in spaces, _, - or case only"),
        (["train/day/dog", "test/day/dog", "test/day/dogs"], "['dogs'] have test images, but "),
        (  # one domain is enough
            [f"{split}/day/dog" for split in ("train", "test")]
            + [f"{split}/night/dogs" for split in ("train", "test")] + ["test/day/dogs"],
            None,
        ),
    ],
)  # fmt: skip
def test_names_that_may_be_spelt_wrong_raise_a_warning(tmp_path, places, warning, recwarn):
    DomainFolders(pictures(tmp_path, *places))
    said = [str(w.message) for w in recwarn]
    assert len(said) == (warning is not None)
    assert (warning or "") in "".join(said)


def test_labels_that_differ_in_spaces_only_raise_a_warning(tmp_path):
    pictures(tmp_path, "day/dog")
    files = sorted((tmp_path / "day/dog").iterdir())
    rows = [(files[0], "dog", "train"), (files[1], "dog ", "train"), (files[2], "dog", "test")]
    lines = [f"day/dog/{file.name},day,{label},{split}\n" for file, label, split in rows]
    (tmp_path / "t.csv").write_text("file,domain,label,split\n" + "".join(lines))
    with pytest.warns(UserWarning, match="'dog' and 'dog ' differ in spaces, _, - or case only"):
        DomainFolders(tmp_path / "t.csv")


@pytest.mark.parametrize("classes", [None, ["cat", "dog"]])
def test_a_class_folder_with_files_that_are_no_images_is_refused(tmp_path, classes):
    pictures(tmp_path, "day/dog", "night/dog")
    (tmp_path / "day" / "cat").mkdir()
    (tmp_path / "day" / "cat" / "Thumbs.db").touch()  # not a file of the user
    assert DomainFolders(tmp_path, classes=classes).classes == classes or ["dog"]
    (tmp_path / "day" / "cat" / "0.GIF").touch()
    with pytest.raises(ValueError, match=r"day/cat has files, but no images: .*\.jpg, .*webp"):
        DomainFolders(tmp_path, classes=classes)


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
    (tmp_path / "images.xlsx").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"images.xlsx is neither a folder nor a .csv"):
        DomainFolders(tmp_path / "images.xlsx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there are no domains in"):
        DomainFolders(tmp_path / "empty")
    (tmp_path / "empty" / "day" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match="domain 'day' has no images for the 'train' stream"):
        DomainFolders(tmp_path / "empty")
    for i in range(2):
        paint(tmp_path / f"empty/day/cat/{i}.png", 0)
    with pytest.raises(ValueError, match=r"'day' has no images for testing: .* takes three images"):
        DomainFolders(tmp_path / "empty")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("./day/../day/cat/5.png,day,cat,test", "5.png is a training image and a test image"),
        ("link/cat/5.png,night,cat,test", "5.png is a training image and a test image"),
        ("day/cat/0.png,night,cat,train", "^{}/day/cat/0.png is a training .* a test image$"),
        ("day/cat/5.png,night,dog,train", "5.png is listed twice, as 'cat' and 'dog'"),
        ("day/./cat/5.png,day,cat,train", "5.png is listed twice, as 'cat'"),
        ("linked.png,night,cat,test", "linked.png is a training image and a test image"),
    ],
)
def test_an_image_has_one_use_whatever_its_path(tmp_path, row, message):
    table = own(tmp_path, "csv")
    (tmp_path / "link").symlink_to(tmp_path / "day")
    (tmp_path / "linked.png").symlink_to(tmp_path / "day/cat/5.png")
    table.write_text(f"{table.read_text()}{row}\n")
    with pytest.raises(ValueError, match=message.format(tmp_path)):
        DomainFolders(table)


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("night/fox/3.png", "night/fox/33.png", "night/fox/33.png"),
        ("night/fox/3.png", "night/fox", "night/fox"),  # not a file
        ("night/", "mine/night/", "mine/night/dog/2.png"),
        ("night/", "C:\\mine\\", r"C:\mine\dog/2.png"),
    ],
)
def test_listed_images_that_do_not_exist_are_errors_at_once(tmp_path, old, new, path):
    table = own(tmp_path, "csv")
    table.write_text(table.read_text().replace(old, new))
    n = 1 if "fox" in old else 16
    message = f"there is no file {tmp_path / path}, which {table} names ({n} of "
    with pytest.raises(ValueError, match=re.escape(message)):
        DomainFolders(table)
    DomainFolders(table, domains=["day"])


@pytest.mark.parametrize(
    ("separator", "slash", "encoding"),
    [(",", "\\", "utf-8"), (";", "/", "utf-8-sig"), ("\t", "\\", "utf-8-sig")],
)
def test_tables_of_windows_are_read(tmp_path, monkeypatch, separator, slash, encoding):
    table = own(tmp_path, "csv")
    text = table.read_text().replace(",", separator).replace("/", slash).replace("train", "Train")
    table.write_text(text, encoding=encoding)
    check_labels(open_stream(DomainFolders, table), OWN_CODES)
    monkeypatch.chdir(tmp_path)
    here = Path("TABLE.TSV" if separator == "\t" else "TABLE.CSV")
    check_labels(open_stream(DomainFolders, Path(table.name).rename(here)), OWN_CODES)


@pytest.mark.parametrize(("only", "lacks"), [("train", "testing"), ("test", "training")])
def test_a_table_needs_images_for_training_and_testing(tmp_path, only, lacks):
    table = own(tmp_path, "csv")
    rows = [line for line in table.read_text().splitlines() if line.endswith(("split", only))]
    table.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=f"{table} has no images for {lacks}$"):
        DomainFolders(table)


def test_tables_and_folders_may_differ_in_unicode_normalisation(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    rows = []
    for i, (on_disk, listed) in enumerate([(composed, decomposed), (decomposed, composed)]):
        for split in ("train", "test"):
            paint(tmp_path / on_disk / f"{on_disk}{i}{split}.png", 0)
            rows.append(f"{listed}/{listed}{i}{split}.png,day,{listed},{split}\n")
    (tmp_path / "a.csv").write_text("file,domain,label,split\n" + "".join(rows))
    benchmark = open_stream(DomainFolders, tmp_path / "a.csv")
    assert benchmark.classes == [composed]
    check_labels(benchmark, {"day": 0})


def object_pictures(root: Path, counts: dict[tuple[str, str], list[int]]) -> Path:
    """Three pictures ``oK_I.png`` of each object K of a domain and class."""
    for ((domain, name), objects), i in itertools.product(counts.items(), range(3)):
        for k in objects:
            paint(root / domain / name / f"o{k}_{i}.png", OWN_CLASSES.index(name))
    return root


def objects_of(benchmark) -> dict[tuple[str, str], set[str]]:
    """The objects of each stream and domain, by file name."""
    return {
        (stream, domain): {Path(file).name.partition("_")[0] for file in images.names}
        for stream, domains in benchmark.images.items()
        for domain, images in domains.items()
    }


_objects = st.lists(st.integers(0, 12), min_size=3, max_size=9, unique=True)


@settings(max_examples=25, deadline=None)
@given(
    counts=st.fixed_dictionaries(dict.fromkeys(itertools.product(OWN, ("cat", "dog")), _objects)),
    validation_size=st.sampled_from([0.0, 0.2, 0.4]),
    seed=st.integers(0, 5),
    as_table=st.booleans(),
)
def test_images_of_a_group_stay_together(counts, validation_size, seed, as_table):
    """In every domain and class, whether file names or a column of a table tell the groups."""
    with TemporaryDirectory() as folder:
        root = object_pictures(Path(folder), counts)
        groups = r"^(o\d+)_"
        if as_table:
            rows = [f"{f.relative_to(root)},{f.parts[-3]},{f.parts[-2]},{f.name[:-6]}\n"
                    for f in sorted(root.rglob("*.png"))]  # fmt: skip
            root, groups = root / "table.csv", "object"
            root.write_text("file,domain,label,object\n" + "".join(rows))
        options = dict(groups=groups, validation_size=validation_size, seed=seed)
        try:
            benchmark = DomainFolders(root, **options)
        except ValueError as error:  # where objects are too few and shared by too many classes
            assume("has no images for the" not in str(error))
            raise
        again = DomainFolders(root, domains=["night", "day"], **options)
        assert objects_of(again) == objects_of(benchmark)
        used = defaultdict(set)
        for (stream, _), objects in objects_of(benchmark).items():
            for name in objects:
                used[name].add(stream)
        assert all(len(streams) == 1 for streams in used.values())
        images = [image for d in benchmark.images.values() for i in d.values() for image in i.names]
        assert len(images) == len({*images}) == 3 * sum(map(len, counts.values()))
        for domain, label in itertools.product(("day", "night"), (0, 1)):  # none is without
            assert label in benchmark.images["train"][domain].labels


def test_each_class_of_the_same_objects_is_tested_on_a_fifth_of_them(tmp_path):
    counts = {(d, c): [*range(10)] for d in ("day", "night") for c in ("cat", "dog")}
    found = objects_of(DomainFolders(object_pictures(tmp_path, counts), groups=r"o\d+"))
    assert found["test", "day"] == found["test", "night"]
    assert len(found["test", "day"]) == 2
    with pytest.raises(ValueError, match=r"'\[' is neither a column of a table nor a regular"):
        DomainFolders(tmp_path, groups="[")
    message = "groups = 'x' is not a column of a table, nor found in the file name 'o0_0.png'"
    with pytest.raises(ValueError, match=re.escape(message)):
        DomainFolders(tmp_path, groups="x")
    with pytest.raises(ValueError, match=r"groups = 'o' leaves no group for testing: each class"):
        DomainFolders(tmp_path, groups="o")


def test_given_splits_of_groups_are_checked(tmp_path):
    root = own(tmp_path / "split", "split")
    split = open_stream(DomainFolders, root, groups=r"^\d")  # 0 and 1 are for testing
    assert {file.stem for file in split.images["test"]["day"].files} == {"0", "1"}
    with pytest.raises(ValueError, match="the group 'png' has training images and test images"):
        DomainFolders(root, groups="png$")
    table = own(tmp_path / "csv", "csv")
    lines = [f"{line},{i % 2}" for i, line in enumerate(table.read_text().splitlines())]
    table.write_text("\n".join([lines[0][:-1] + "person", *lines[1:]]))
    with pytest.raises(ValueError, match=r"the group '[01]' has training images and test images"):
        DomainFolders(table, groups="person")
    table.write_text(table.read_text()[:-1])
    with pytest.raises(ValueError, match=r"csv: row \d+ after the header has no 'person'"):
        DomainFolders(table, groups="person")
