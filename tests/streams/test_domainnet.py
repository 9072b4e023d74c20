"""DomainNet: class ids in spite of missing classes, counts, layouts."""

import pytest
from miniature import CODES, check_labels, domainnet, open_stream, paint

from covon_avalanche.domain_orders import DOMAINNET
from covon_avalanche.streams import DomainNet
from covon_avalanche.streams.domainnet import COUNTS


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
    for part in ("train", "test"):
        (tmp_path / f"real_{part}.txt").write_text("real/t-shirt/a.jpg 327\nreal/zebra/b.jpg 344\n")
        paint(tmp_path / "sketch" / part / "tshirt" / "a.jpg", 0)
    for domain, message in (
        ("clipart", r"there is no folder .*clipart/train"),
        ("real", r"real_train.txt, line 2: .*official id.*zebra"),
        ("sketch", r"subfolders that are not classes: \['tshirt'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            DomainNet(dataset_root=tmp_path, domains=[domain])
