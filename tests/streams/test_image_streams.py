"""Streams of images: miniature trees with the real layouts, names and traps, and real PACS."""

import itertools
import pickle
import re
import shutil
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from avalanche.training import LwF
from miniature import (
    CODES,
    OWN_CLASSES,
    OWN_CODES,
    cddb,
    core50,
    domainnet,
    own,
    paint,
)
from PIL import Image
from torch import nn
from torchvision.datasets.folder import IMG_EXTENSIONS
from toys import QUIET

from covon_avalanche.domain_orders import DOMAINNET, NI_ORDERS
from covon_avalanche.streams import CDDB, PACS, CORe50, DomainFolders, DomainNet
from covon_avalanche.streams.domainnet import COUNTS
from covon_avalanche.streams.image_datasets import decode_pixels
from covon_avalanche.streams.image_files import SUFFIXES, class_folders, image_files


def as_is(image: Image.Image) -> torch.Tensor:
    return torch.tensor(np.asarray(image)[0, 0].astype(np.int64))


def open_stream(stream, root, **options):
    """Without transforms and without the warnings about counts of the real data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"train_transform": as_is, "eval_transform": as_is, **options}
        return stream(dataset_root=root, **options)


def seen(experience) -> list[tuple[int, int, int]]:
    """Label, class by colour, domain by colour."""
    rows = (experience.dataset[i] for i in range(len(experience.dataset)))
    return [(int(y), int(x[0]) * 256 + int(x[1]), int(x[2])) for x, y, *_ in rows]


def check_labels(benchmark, domain_codes):
    """All labels are those of the colours, in every stream."""
    for stream in benchmark.streams.values():
        for experience in stream:
            rows = seen(experience)
            assert rows
            assert all(label == painted for label, painted, _ in rows)
            assert {code for *_, code in rows} == {domain_codes[experience.domain]}
            assert set(experience.dataset.targets_task_labels) == {0}


# DomainNet -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["lists", "folders"])
def domainnet_root(request, tmp_path_factory):
    return domainnet(tmp_path_factory.mktemp("domainnet"), request.param)


def test_domainnet_labels_stay_right_where_classes_are_missing(domainnet_root):
    benchmark = open_stream(DomainNet, domainnet_root, domains=["painting", "clipart"])
    check_labels(benchmark, CODES)
    assert [e.domain for e in benchmark.train_stream] == ["painting", "clipart"]
    assert benchmark.n_classes == 345
    painting = benchmark.train_stream[0]
    assert 327 not in painting.classes_in_this_experience
    assert 300 not in benchmark.test_stream[0].classes_in_this_experience
    assert {327, 300} <= set(benchmark.train_stream[1].classes_in_this_experience)


def test_domainnet_says_when_counts_differ(domainnet_root):
    with pytest.warns(UserWarning, match=r"clipart should have \(33525, 14604\).*found \(345, 345"):
        DomainNet(dataset_root=domainnet_root, domains=["clipart"])
    assert tuple(COUNTS) == DOMAINNET
    assert [sum(c) for c in zip(*COUNTS.values(), strict=True)] == [409_832, 176_743]


def test_domainnet_refuses_wrong_ids_and_unknown_folders(tmp_path):
    with pytest.raises(ValueError, match=r"neither real_train.txt and real_test.txt nor"):
        DomainNet(dataset_root=tmp_path, domains=["real"])
    for part in ("train", "test"):
        (tmp_path / f"real_{part}.txt").write_text("real/t-shirt/a.jpg 327\nreal/zebra/b.jpg 344\n")
    with pytest.raises(ValueError, match=r"real_train.txt, line 2: .*official id.*zebra"):
        DomainNet(dataset_root=tmp_path, domains=["real"])
    for part in ("train", "test"):
        paint(tmp_path / "sketch" / part / "tshirt" / "a.jpg", 0)
    with pytest.raises(ValueError, match=r"folders that are no classes: \['tshirt'\]"):
        DomainNet(dataset_root=tmp_path, domains=["sketch"])


# CDDB ----------------------------------------------------------------------------------


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


# CORe50 --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tree", "archive"])
def test_core50_official_and_authors_splits(tmp_path, layout):
    codes = core50(tmp_path, layout)
    for _ in range(2):  # the second time from what the first has unpacked
        benchmark = open_stream(CORe50, tmp_path, run=3)
        check_labels(benchmark, codes)
        assert [e.domain for e in benchmark.train_stream] == [f"s{k}" for k in NI_ORDERS[3]]
        assert [e.domain for e in benchmark.test_stream] == ["s3", "s7", "s10"]
        assert benchmark.n_classes == 50
    authors = open_stream(CORe50, tmp_path, split="authors", labels="category")
    assert [e.domain for e in authors.train_stream] == [f"s{k}" for k in range(1, 9)]
    assert [e.domain for e in authors.test_stream] == ["s9", "s10", "s11"]
    assert sorted({label for label, *_ in seen(authors.train_stream[0])}) == [0, 1, 9]
    assert authors.n_classes == 10


def test_core50_refuses_a_run_that_would_have_no_effect(tmp_path):
    core50(tmp_path, "tree")
    some = open_stream(CORe50, tmp_path, run=3, domains=["s9", "s4"])
    assert [e.domain for e in some.train_stream] == ["s9", "s4"]
    with pytest.raises(ValueError, match=r"in the order of run 3, .*, got \['s4', 's9'\]"):
        open_stream(CORe50, tmp_path, run=3, domains=["s4", "s9"])
    with pytest.raises(ValueError, match="run is of the official split, got run 3 with the split"):
        open_stream(CORe50, tmp_path, run=3, split="authors")


def test_core50_orders_are_permutations_of_the_official_sessions():
    assert all(sorted(order) == [1, 2, 4, 5, 6, 8, 9, 11] for order in NI_ORDERS)
    assert len(set(NI_ORDERS)) == 10


class Hostile:
    """A pickle that would write a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_core50_runs_nothing_from_its_pickle_and_refuses_damaged_files(tmp_path):
    core50(tmp_path, "archive")
    (tmp_path / "paths.pkl").write_bytes(pickle.dumps([Hostile(tmp_path / "harm")]))
    with pytest.raises(ValueError, match=r"not a pickled list of paths: .*not allowed"):
        open_stream(CORe50, tmp_path)
    assert not (tmp_path / "harm").exists()
    (tmp_path / "paths.pkl").write_bytes(pickle.dumps(["s1/o1/C_01_01_000.png"]))
    with pytest.raises(ValueError, match="has 1 paths for 88 images"):
        open_stream(CORe50, tmp_path)
    (tmp_path / "core50_imgs.npy").unlink()
    (tmp_path / "core50_imgs.npz").write_bytes(b"PK no zip")
    with pytest.raises(ValueError, match=r"core50_imgs.npz is damaged"):
        open_stream(CORe50, tmp_path)
    left = {p.name for p in tmp_path.iterdir()} - {".core50_imgs.lock"}
    assert left == {"core50_imgs.npz", "paths.pkl"}
    with pytest.raises(ValueError, match=r"run must be in 0 to 9, got 10"):
        CORe50(dataset_root=tmp_path, run=10)


def test_core50_is_unpacked_by_one_process_where_there_is_room(tmp_path, monkeypatch):
    core50(tmp_path, "archive")
    left_over = tmp_path / ".core50_imgs.npy.1.part"
    left_over.write_bytes(b"of a run that was killed")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**20))
        with pytest.raises(ValueError, match=r"needs 0.3 GB of free disk, has 0.0"):
            CORe50(dataset_root=tmp_path)
    assert not left_over.exists()
    unpacked = []

    def slow(*args):
        unpacked.append(args)
        time.sleep(0.2)
        copy(*args)

    copy = shutil.copyfileobj
    monkeypatch.setattr("shutil.copyfileobj", slow)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda i: open_stream(CORe50, tmp_path), range(3)))
    assert len(made) == 3
    assert len(unpacked) == 1


# PACS ----------------------------------------------------------------------------------


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


def test_official_lists_of_pacs_count(tmp_path):
    for i, name in enumerate(("a", "b", "c")):
        paint(tmp_path / "photo" / "giraffe" / f"{name}.jpg", 2, i)
    (tmp_path / "splits").mkdir()
    for kind, names in (("train", "ac"), ("crossval", "b")):
        lines = [f"photo/giraffe/{name}.jpg 3\n" for name in names]
        (tmp_path / "splits" / f"photo_{kind}_kfold.txt").write_text("".join(lines))
    benchmark = open_stream(PACS, tmp_path, domains=["photo"])
    assert seen(benchmark.train_stream[0]) == [(2, 2, 0), (2, 2, 2)]
    assert seen(benchmark.test_stream[0]) == [(2, 2, 1)]


@pytest.mark.parametrize(
    "line",
    [
        "photo/dog/0.jpg",
        "photo/dog/0.jpg 0",
        "photo/dog/0.jpg 2",
        "photo/house/0.jpg 8",
        "photo/dog/0.jpg one",
        "photo/cat/0.jpg 1",
    ],
)
def test_lists_of_pacs_with_other_labels_than_the_folders_are_refused(tmp_path, line):
    for kind in ("train", "crossval"):
        (tmp_path / f"photo_{kind}_kfold.txt").write_text(f"photo/dog/1.jpg 1\n\n{line}\n")
    message = "photo_train_kfold.txt, line 3: expected a path DOMAIN/CLASS/FILE and .*, got "
    with pytest.raises(ValueError, match=message + re.escape(repr(line))):
        PACS(dataset_root=tmp_path, domains=["photo"])


# Anyone's folders ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "split", "csv"])
def test_own_folders_share_one_class_table(tmp_path, layout):
    benchmark = open_stream(DomainFolders, own(tmp_path, layout))
    check_labels(benchmark, OWN_CODES)
    assert benchmark.classes == OWN_CLASSES
    assert [len(e.dataset) for e in benchmark.train_stream] == [16, 16]
    assert [len(e.dataset) for e in benchmark.test_stream] == [4, 4]
    assert benchmark.train_stream[1].classes_in_this_experience == {1, 2}


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
def test_own_folders_that_may_be_splits_or_classes_are_refused(tmp_path, folders):
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


def test_validation_images_are_held_out_class_by_class(tmp_path):
    benchmark = open_stream(DomainFolders, own(tmp_path, "split"), validation_size=0.25)
    check_labels(benchmark, OWN_CODES)
    for kept, held_out in zip(benchmark.train_stream, benchmark.streams["valid"], strict=True):
        assert (len(kept.dataset), len(held_out.dataset)) == (12, 4)
        counts = torch.tensor(list(held_out.dataset.targets)).bincount()
        assert sorted(counts[counts > 0].tolist()) == [2, 2]


def test_of_small_classes_one_validation_image_is_held_out(tmp_path):
    """A tenth of four images is none; a single image stays for training."""
    for number, name in enumerate(OWN_CLASSES, start=1):
        for part, i in itertools.product(("train", "test"), range(number)):
            paint(tmp_path / "day" / part / name / f"{i}.png", number - 1, OWN_CODES["day"])
    benchmark = open_stream(DomainFolders, tmp_path, validation_size=0.1)
    check_labels(benchmark, OWN_CODES)
    labels = [sorted(benchmark.images[s]["day"].labels) for s in ("train", "valid")]
    assert labels == [[0, 1, 2, 2], [1, 2]]


def test_a_table_may_begin_with_the_mark_of_its_encoding(tmp_path):
    table = own(tmp_path, "csv")
    table.write_text(table.read_text(encoding="utf-8"), encoding="utf-8-sig")
    check_labels(open_stream(DomainFolders, table), OWN_CODES)


def test_what_lies_beside_the_domains_is_none(tmp_path):
    root = own(tmp_path / "pics", "plain")
    (root / "__MACOSX" / "day" / "cat").mkdir(parents=True)
    (root / "day" / "__MACOSX").mkdir()
    for _ in range(2):
        benchmark = DomainFolders(root, cache=root / "day" / ".." / "cache")
        assert list(benchmark.images["train"]) == ["day", "night"]
        assert benchmark.classes == OWN_CLASSES
    assert list((root / "cache").glob("*.pixels"))


def test_what_does_not_fit_is_named(tmp_path):
    root = own(tmp_path / "good", "plain")
    for options, message in (
        ({"validation_size": 1.0}, r"validation_size must be a fraction in \[0, 1\), got 1.0"),
        ({"limit": 0}, "limit must be >= 1, got 0"),
        ({"domains": ["dawn"]}, r"has the domains \['day', 'night'\], got \['dawn'\]"),
        ({"domains": ["day", "day"]}, "domains must be distinct"),
        ({"classes": ["cat", "dog"]}, r"no classes: \['fox'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            DomainFolders(root, **options)
    with pytest.raises(ValueError, match="there is no folder"):
        DomainFolders(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"nowhere.csv cannot be read: No such file"):
        DomainFolders(tmp_path / "nowhere.csv")
    (tmp_path / "a.csv").write_text("file,domain,label\n")
    with pytest.raises(ValueError, match=r"lacks the columns \['split'\]"):
        DomainFolders(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("file,domain,label,split\nx.png,day,cat,valid\n")
    with pytest.raises(ValueError, match="line 2: split must be train or test, got 'valid'"):
        DomainFolders(tmp_path / "b.csv")
    table = (tmp_path / "b.csv").read_text()
    (tmp_path / "b.csv").write_text(f"# as `covon data verify` begins\n{table}")
    with pytest.raises(ValueError, match="line 3: split must be train or test, got 'valid'"):
        DomainFolders(tmp_path / "b.csv")
    for row in ("y.png,day,cat", "y,1.png,day,cat,train"):
        (tmp_path / "c.csv").write_text(f"file,domain,label,split\nx.png,day,cat,test\n{row}\n")
        with pytest.raises(ValueError, match=r"c.csv, line 3: expected 4 values: file, domain, "):
            DomainFolders(tmp_path / "c.csv")
    (tmp_path / "d.csv").write_text("file,domain,label,split\né.png,day,cat,test\n", "latin-1")
    with pytest.raises(ValueError, match=r"d.csv is not text in UTF-8: .* byte 0xe9"):
        DomainFolders(tmp_path / "d.csv")
    (tmp_path / "empty" / "day" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match="domain 'day' has no images for the 'train' stream"):
        DomainFolders(tmp_path / "empty")


def test_an_image_that_cannot_be_decoded_is_named(tmp_path):
    root = own(tmp_path, "split")
    (root / "day" / "train" / "cat" / "2.png").write_bytes(b"no image")
    benchmark = open_stream(DomainFolders, root)
    with pytest.raises(ValueError, match=r"day/train/cat/2.png cannot be decoded"):
        seen(benchmark.train_stream[0])


def test_links_count_but_not_in_a_circle(tmp_path):
    elsewhere, root = tmp_path / "elsewhere" / "cat", tmp_path / "day"
    paint(elsewhere / "0.png", 0)
    paint(root / "fox" / "0.png", 1)
    (root / "fox" / "1.png").symlink_to(elsewhere / "0.png")
    (root / "fox" / "circle").symlink_to(root)
    (root / "fox" / "gone").symlink_to(root / "nowhere")
    (root / "fox" / "gone.png").symlink_to(root / "nowhere.png")
    (root / "fox" / "more").symlink_to(elsewhere)
    (root / "cat").symlink_to(elsewhere)
    found = class_folders(root, ["cat", "fox"]).files
    expected = ["cat/0.png", "fox/0.png", "fox/1.png", "fox/more/0.png"]
    assert found == [root / name for name in expected]


def test_folders_linked_with_each_other_are_no_circle(tmp_path):
    root, elsewhere = tmp_path / "day", tmp_path / "elsewhere"
    for name in ("cat", "fox"):
        paint(root / name / "0.png", 0)
        (root / name / "more").symlink_to(elsewhere)
    paint(elsewhere / "1.png", 0)
    (elsewhere / "back").symlink_to(root / "cat")
    expected = ["cat/0.png", "cat/more/1.png"]
    assert image_files(root / "cat") == [root / name for name in expected]
    assert root / "fox/more/1.png" in class_folders(root, ["cat", "fox"]).files


def test_all_that_torchvision_takes_for_images_is_found_and_decoded(tmp_path):
    assert {*SUFFIXES} == {*IMG_EXTENSIONS}
    for suffix in SUFFIXES:
        Image.new("L" if suffix == ".pgm" else "RGB", (4, 4)).save(tmp_path / f"1{suffix.upper()}")
    files = image_files(tmp_path)
    assert len(files) == len(SUFFIXES)
    assert all(decode_pixels(file).shape == (3, 4, 4) for file in files)


def test_what_is_hidden_does_not_count(tmp_path):
    for name in ("1.jpg", "._1.jpg", ".ipynb_checkpoints/1-checkpoint.jpg", "a/.b/c/1.jpg"):
        paint(tmp_path / ".data" / "cat" / name, 0)
    found = class_folders(tmp_path / ".data", ["cat"]).files
    assert found == [tmp_path / ".data" / "cat" / "1.jpg"]


def test_avalanches_own_methods_train_on_them(tmp_path):
    benchmark = DomainFolders(own(tmp_path, "split"))
    model = nn.Sequential(nn.AvgPool2d(56), nn.Flatten(), nn.Linear(48, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**QUIET, "train_epochs": 1}
    strategy = LwF(
        model=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        alpha=1.0,
        temperature=2.0,
        **options,
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
    strategy.eval(benchmark.test_stream)
    assert all(torch.isfinite(p).all() for p in model.parameters())
