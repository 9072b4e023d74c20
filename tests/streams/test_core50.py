"""CORe50: both layouts, splits, orders; safe loading of its pickle."""

import pickle
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from miniature import check_labels, core50, open_stream, seen

from covon_avalanche.domain_orders import NI_ORDERS
from covon_avalanche.streams import CORe50


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
    with pytest.raises(ValueError, match="run is for the official split, got run 3 with the split"):
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


def test_core50_is_unpacked_by_one_process(tmp_path, monkeypatch):
    core50(tmp_path, "archive")
    left_over = tmp_path / ".core50_imgs.npy.1.part"
    left_over.write_bytes(b"of a run that was killed")
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
    assert not left_over.exists()
