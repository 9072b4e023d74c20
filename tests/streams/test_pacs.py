"""PACS: real data split by name, official lists."""

import re

import pytest
import torch
from miniature import open_stream, paint, seen

from covon_avalanche import domain_orders
from covon_avalanche.streams import PACS
from covon_avalanche.streams.pacs import COUNTS


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
    assert tuple(COUNTS) == domain_orders.PACS


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
