"""CORe50: splits, orders, labels from file names."""

import pytest
from miniature import check_labels, core50, open_stream, paint, seen

from covon_avalanche.domain_orders import NI_ORDERS
from covon_avalanche.streams import CORe50


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
