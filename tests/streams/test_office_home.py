"""Office-Home: class ids, the split, lists, and what is wrong with a copy."""

import pytest
import torch
from miniature import OFFICE_HOME_CODES, check_labels, office_home, open_stream, paint, seen

from covon_avalanche.domain_orders import OFFICE_HOME, OFFICE_HOME_DUCT
from covon_avalanche.streams import OfficeHome
from covon_avalanche.streams.office_home import CLASSES, COUNTS

TWO = list(OFFICE_HOME_CODES)


@pytest.fixture(scope="module", params=["Real World", "Real_World"])
def root(request, tmp_path_factory):
    return office_home(tmp_path_factory.mktemp("office_home"), request.param)


def test_facts():
    assert len(CLASSES) == 65
    assert list(CLASSES) == sorted(set(CLASSES))
    assert (CLASSES[0], CLASSES.index("TV"), CLASSES[-1]) == ("Alarm_Clock", 58, "Webcam")
    assert tuple(COUNTS) == OFFICE_HOME
    assert sum(COUNTS.values()) == 15_588
    assert {frozenset(order) for order in OFFICE_HOME_DUCT} == {frozenset(OFFICE_HOME)}


def test_three_tenths_of_each_class_are_for_testing(root):
    benchmark = open_stream(OfficeHome, root, domains=TWO[::-1])
    check_labels(benchmark, OFFICE_HOME_CODES)
    assert [e.domain for e in benchmark.train_stream] == TWO[::-1]
    assert benchmark.n_classes == 65
    for stream, images in (("train", 7), ("test", 3)):
        for experience in benchmark.streams[stream]:
            counts = torch.tensor(list(experience.dataset.targets)).bincount()
            assert counts.tolist() == [images] * 65
    for name in TWO:
        train, test = ({*benchmark.images[s][name].files} for s in ("train", "test"))
        assert not train & test


def test_the_split_depends_on_its_own_seed_only_and_not_on_where_the_data_lie(root, tmp_path):
    def tested(root, **options):
        images = open_stream(OfficeHome, root, domains=TWO, **options).images["test"]
        return {(n, f.parent.name, f.name) for n, part in images.items() for f in part.files}

    first = tested(root)
    assert tested(office_home(tmp_path / "elsewhere")) == first
    assert tested(root, seed=5) == first
    other = tested(root, split_seed=1)
    assert len(other) == len(first)
    assert 0.2 < len(other & first) / len(first) < 0.4  # 0.3 for independent choices
    by_domain = [{entry[1:] for entry in first if entry[0] == name} for name in TWO]
    assert by_domain[0] != by_domain[1]


def test_lists_decide_where_they_exist(tmp_path):
    for domain, spelling in (("Art", "Art"), ("Real World", "Real_World")):
        for name in "abc":
            paint(tmp_path / domain / "Batteries" / f"{name}.jpg", 2, OFFICE_HOME_CODES[domain])
        for part, names in (("train", "ac"), ("test", "b")):
            lines = [f"{domain}/Batteries/{name}.jpg 2\n" for name in names]
            (tmp_path / f"{spelling}_{part}.txt").write_text("".join(lines))
    benchmark = open_stream(OfficeHome, tmp_path, domains=TWO)
    assert [seen(e) for e in benchmark.train_stream] == [[(2, 2, 1)] * 2, [(2, 2, 2)] * 2]
    assert [seen(e) for e in benchmark.test_stream] == [[(2, 2, 1)], [(2, 2, 2)]]


def test_missing_images_and_classes_are_named(tmp_path):
    root = office_home(tmp_path)
    with pytest.warns(UserWarning, match="Art should have 2427 images, found 650"):
        OfficeHome(dataset_root=root, domains=["Art"])
    with pytest.raises(ValueError, match=r"there is no folder .*Product"):
        OfficeHome(dataset_root=root, domains=["Product"])
    for file in (root / "Art" / "TV").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"Art has no images of the classes \['TV'\]"):
        OfficeHome(dataset_root=root, domains=["Art"])
