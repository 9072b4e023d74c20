"""Published data sets: class ids, labels, splits, orders, official lists, numbers."""

import re
from functools import cache, partial

import miniature
import numpy as np
import pytest
import torch
from miniature import OFFICE_HOME_CODES, cddb, check_labels, core50, open_stream, paint, seen

from covon_avalanche import domain_orders, streams
from covon_avalanche.domain_orders import NI_ORDERS
from covon_avalanche.streams import CDDB, PACS, CORe50, DomainNet, ImageNetR, OfficeHome

HOME = OFFICE_HOME_CODES, (7, 3), [65, 65]
NET = miniature.CODES, (1, 1), [345, 344]  # painting lacks a class in training, another in testing
COPIES = {
    "PACS": (PACS, miniature.pacs, {"photo": 1, "sketch": 2}, (8, 2), [7, 7]),
    "OfficeHome": (OfficeHome, miniature.office_home, *HOME),
    "Real_World": (OfficeHome, partial(miniature.office_home, real_world="Real_World"), *HOME),
    "ImageNetR": (ImageNetR, miniature.imagenet_r, miniature.IMAGENET_R_CODES, (8, 2), [4, 4, 1]),
    "DomainNet": (DomainNet, partial(miniature.domainnet, layout="lists"), *NET),
    "folders": (DomainNet, partial(miniature.domainnet, layout="folders"), *NET),
}
"""Miniature copies: stream, its files, the domains' colours, training and test images of each
class, and how many classes the domains have."""


@pytest.fixture(scope="module")
def copy_of(tmp_path_factory):
    """The folder of a miniature copy, which is made once."""
    return cache(lambda name: COPIES[name][1](tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize(
    ("module", "name", "classes", "images"),
    [
        (streams.domainnet, "DomainNet", 345, [409_832, 176_743]),
        (streams.imagenet_r, "ImageNetR", 200, 30_000),
        (streams.office_home, "OfficeHome", 65, 15_588),
        (streams.pacs, "PACS", 7, 9_991),
    ],
)
def test_facts(module, name, classes, images):
    assert len({*module.CLASSES}) == len(module.CLASSES) == classes
    assert list(module.CLASSES) == sorted(module.CLASSES) or module is streams.domainnet
    assert np.sum([*domain_orders.COUNTS[name].values()], axis=0).tolist() == images


def test_other_orders_are_of_the_same_domains():
    orders = {frozenset(order) for order in domain_orders.OFFICE_HOME_DUCT}
    assert orders == {frozenset(domain_orders.OFFICE_HOME)}
    assert tuple(sorted(domain_orders.IMAGENET_R)) == domain_orders.IMAGENET_R


@pytest.mark.parametrize("name", COPIES)
def test_labels_and_numbers_of_each_class(name, copy_of):
    stream, _, codes, images, classes = COPIES[name]
    domains = [*codes][::-1]
    benchmark = open_stream(stream, copy_of(name), domains=domains)
    check_labels(benchmark, codes)
    assert [e.domain for e in benchmark.train_stream] == domains
    assert benchmark.n_classes == len(benchmark.classes)
    for part, of_each in zip(("train", "test"), images, strict=True):
        counts = [torch.tensor([*e.dataset.targets]).bincount() for e in benchmark.streams[part]]
        assert all({*found.tolist()} <= {0, of_each} for found in counts)
        assert [int(found.count_nonzero()) for found in counts] == classes[::-1]
    for name in domains:
        train, test = ({*benchmark.images[part][name].files} for part in ("train", "test"))
        assert not train & test


@pytest.mark.parametrize("name", ["OfficeHome", "ImageNetR"])
def test_the_split_depends_on_its_own_seed_and_not_on_where_the_data_lie(name, copy_of, tmp_path):
    stream, make, codes, *_ = COPIES[name]

    def tested(folder, **options):
        images = open_stream(stream, folder, domains=[*codes], **options).images["test"]
        return {(n, f.parent.name, f.name) for n, part in images.items() for f in part.files}

    first, other = tested(copy_of(name)), tested(copy_of(name), split_seed=1)
    assert tested(make(tmp_path)) == tested(copy_of(name), seed=5) == first
    assert len(other) == len(first)
    assert 0 < len(other & first) / len(first) < 0.5  # of independent choices 0.3 and 0.2
    by_domain = [{entry[1:] for entry in first if entry[0] == name} for name in codes]
    assert by_domain[0] != by_domain[1]


@pytest.mark.parametrize(
    ("stream", "domain", "image", "number", "lists"),
    [
        (PACS, "photo", "photo/giraffe/{}.jpg", 3, "splits/photo_{}_kfold.txt"),
        (OfficeHome, "Art", "Art/Batteries/{}.jpg", 2, "Art_{}.txt"),
        (OfficeHome, "Real World", "Real World/Batteries/{}.jpg", 2, "Real_World_{}.txt"),
        (ImageNetR, "art", "n01534433/art_{}.jpg", 135, "art_{}.txt"),  # class 7
    ],
)
def test_lists_decide_where_they_exist(stream, domain, image, number, lists, tmp_path):
    label = 7 if stream is ImageNetR else 2
    for i in range(3):
        paint(tmp_path / image.format(i), label, i)
    for part, chosen in (("train", (2, 0)), ("crossval" if stream is PACS else "test", (1,))):
        lines = "".join(f"{image.format(i)} {number}\n" for i in chosen)
        file = tmp_path / lists.format(part)
        file.parent.mkdir(exist_ok=True)
        file.write_text(lines)
    benchmark = open_stream(stream, tmp_path, domains=[domain])
    assert seen(benchmark.train_stream[0]) == [(label, label, 2), (label, label, 0)]
    assert seen(benchmark.test_stream[0]) == [(label, label, 1)]


@pytest.mark.parametrize(
    ("name", "domain", "line", "error"),
    [
        ("PACS", "photo", "photo/dog/0.jpg", "expected a path DOMAIN/CLASS/FILE and .*, got {}"),
        ("PACS", "photo", "photo/dog/0.jpg 0", "expected a path DOMAIN/CLASS/FILE and .*, got {}"),
        ("PACS", "photo", "photo/cat/0.jpg 1", "expected a path DOMAIN/CLASS/FILE and .*, got {}"),
        ("DomainNet", "real", "real/zebra/b.jpg 344", "expected .* official id .*, got {}"),
        ("ImageNetR", "art", "n00000000/art_0.jpg 1", "expected a path CLASS/FILE .*, got {}"),
        ("ImageNetR", "art", "n01443537/sketch_0.jpg 0", "other domains than 'art': .*sketch_0"),
    ],
)
def test_lists_of_something_else_are_refused(name, domain, line, error, tmp_path):
    good = {"PACS": "photo/dog/1.jpg 1\n\n", "DomainNet": "real/zebra/a.jpg 343\n\n"}.get(name, "")
    miniature.imagenet_r(tmp_path)
    kinds = ("train_kfold", "crossval_kfold") if name == "PACS" else ("train", "test")
    for kind in kinds:
        (tmp_path / f"{domain}_{kind}.txt").write_text(f"{good}{line}\n")
    where = rf"{domain}_{kinds[0]}\.txt.*{', line 3: ' if good else ''}"
    with pytest.raises(ValueError, match=where + error.format(re.escape(repr(line)))):
        open_stream(getattr(streams, name), tmp_path, domains=[domain])


def test_lists_of_windows_are_read_and_missing_images_are_errors_at_once(tmp_path):
    root = miniature.domainnet(tmp_path, "lists")
    for encoding in ("utf-8", "utf-8-sig"):
        for file in root.glob("*.txt"):
            file.write_text(file.read_text().replace("/", "\\"), encoding=encoding)
        check_labels(open_stream(DomainNet, root, domains=["clipart"]), miniature.CODES)
    next((root / "painting" / "zebra").iterdir()).unlink()
    with pytest.raises(ValueError, match=r"no file .*zebra.*painting_t.*txt names \(1 of "):
        open_stream(DomainNet, root, domains=[*miniature.CODES])
    open_stream(DomainNet, root, domains=["clipart"])


def test_numbers_other_than_the_published_ones_are_remarked_upon(copy_of):
    for name, message in (
        ("DomainNet", r"DomainNet's clipart should have \(33525, 14604\) .* found \(345, 345\)"),
        ("OfficeHome", "OfficeHome's Art should have 2427 images, found 650"),
        ("ImageNetR", "ImageNetR's art should have 1528 images, found 40"),
    ):
        stream, _, codes, *_ = COPIES[name]
        with pytest.warns(UserWarning, match=message):
            stream(dataset_root=copy_of(name), domains=[*codes][:1])


def test_missing_and_unknown_folders_are_named(tmp_path):
    miniature.imagenet_r(tmp_path)
    for file in (miniature.office_home(tmp_path) / "Art/TV").iterdir():
        file.unlink()
    paint(tmp_path / "sketch/train/tshirt/a.jpg", 0)
    for name, domain, message in (
        ("DomainNet", "clipart", r"there is no folder .*clipart/train"),
        ("DomainNet", "sketch", r"subfolders that are not classes: \['tshirt'\]"),
        ("OfficeHome", "Product", r"there is no folder .*Product"),
        ("OfficeHome", "Art", r"Art has no images of the classes \['TV'\]"),
        ("ImageNetR", "art", r"subfolders that are not classes: \['Art', 'Real World', 'sketch'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            open_stream(getattr(streams, name), tmp_path, domains=[domain])


def test_real_pacs_is_split_by_name(real_data):
    root = real_data("PACS") / "PACS"
    benchmark = PACS(dataset_root=root)
    names = ["photo", "art_painting", "cartoon", "sketch"]
    assert [e.domain for e in benchmark.train_stream] == names
    totals = []
    for train, test in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        both = [torch.tensor(list(e.dataset.targets)).bincount() for e in (train, test)]
        totals.append(int(sum(both).sum()))
        assert ((both[1] / sum(both)) - 0.2).abs().max() < 0.01
    assert totals == [1670, 2048, 2344, 3929]
    x, y, task = benchmark.train_stream[0].dataset[0]
    assert (x.shape, y, task) == ((3, 224, 224), 0, 0)
    small = PACS(dataset_root=root, domains=names[::-1], limit=3)
    assert [e.domain for e in small.test_stream] == names[::-1]
    assert [len(e.dataset) for e in small.train_stream] == [21] * 4


@pytest.fixture
def root(tmp_path):
    core50(tmp_path)
    return tmp_path


def names(stream):
    return [experience.domain for experience in stream]


def test_official_and_authors_splits(root):
    benchmark = open_stream(CORe50, root, run=3)
    check_labels(benchmark, {f"s{k}": k for k in range(1, 12)})
    assert names(benchmark.train_stream) == [f"s{k}" for k in NI_ORDERS[3]]
    assert names(benchmark.test_stream) == ["s3", "s7", "s10"]
    assert benchmark.n_classes == 50
    authors = open_stream(CORe50, root, split="authors", labels="category")
    assert names(authors.train_stream) == [f"s{k}" for k in range(1, 9)]
    assert names(authors.test_stream) == ["s9", "s10", "s11"]
    assert sorted({label for label, *_ in seen(authors.train_stream[0])}) == [0, 1, 9]
    assert authors.n_classes == 10


def test_orders_are_permutations_of_the_official_sessions():
    assert all(sorted(order) == [1, 2, 4, 5, 6, 8, 9, 11] for order in NI_ORDERS)
    assert len(set(NI_ORDERS)) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run": 3, "domains": ["s4", "s9"]}, r"in the order of run 3, .*, got \['s4', 's9'\]"),
        ({"run": 3, "split": "authors"}, "run is for the official split, got run 3 with the split"),
        ({"run": 10}, "run must be one of 0, 1, .*, 9, got 10"),
        ({"split": "Official"}, "split must be one of .*, got 'Official'"),
        ({"labels": "class"}, "labels must be one of 'object', 'category', got 'class'"),
    ],
)
def test_options_without_effect_or_meaning_are_refused(root, options, message):
    with pytest.raises(ValueError, match=message):
        open_stream(CORe50, root, **options)
    some = open_stream(CORe50, root, run=3, domains=["s9", "s4"])
    assert names(some.train_stream) == ["s9", "s4"]


def test_missing_sessions_and_other_names_are_refused(root):
    (root / "core50_128x128/s7").rename(root / "elsewhere")
    with pytest.raises(ValueError, match=r"has no images of the sessions \['s7'\]"):
        open_stream(CORe50, root)
    paint(root / "core50_128x128/s1/o1/C_12_01_000.png", 0)
    with pytest.raises(ValueError, match=r"C_12_01_000.png is not named C_SESSION_OBJECT_FRAME"):
        open_stream(CORe50, root)


def test_cddb_finds_labels_at_any_depth_and_tests_on_val(tmp_path):
    codes = cddb(tmp_path)
    benchmark = open_stream(CDDB, tmp_path, track="easy", domains=list(codes))
    check_labels(benchmark, codes)
    assert [len(e.dataset) for e in benchmark.test_stream] == [6, 6, 6]
    assert benchmark.classes == ["real", "fake"]


def test_cddb_tracks_and_errors(tmp_path):
    cddb(tmp_path)
    with pytest.raises(ValueError, match=r"CDDB \(hard\) has the domains .* got \['cyclegan'\]"):
        CDDB(dataset_root=tmp_path, domains=["cyclegan"])
    with pytest.raises(ValueError, match="track must be one of"):
        CDDB(dataset_root=tmp_path, track="Hard")
    with pytest.raises(ValueError, match=r"no folder .*wild"):
        CDDB(dataset_root=tmp_path, domains=["wild"])
    paint(tmp_path / "gaugan" / "train" / "stray.png", 0)
    with pytest.raises(ValueError, match=r"stray.png is in no folder named 0_real or 1_fake"):
        CDDB(dataset_root=tmp_path, domains=["gaugan"])
