"""Image benchmarks: validation split, limits, Avalanche's methods."""

import itertools

import pytest
import torch
from avalanche.training import LwF
from miniature import OWN_CLASSES, OWN_CODES, check_labels, open_stream, own, paint, seen
from torch import nn
from toys import QUIET

from covon_avalanche.streams import DomainFolders


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


def test_an_image_that_cannot_be_decoded_is_named(tmp_path):
    root = own(tmp_path, "split")
    (root / "day" / "train" / "cat" / "2.png").write_bytes(b"no image")
    benchmark = open_stream(DomainFolders, root)
    with pytest.raises(ValueError, match=r"day/train/cat/2.png cannot be decoded"):
        seen(benchmark.train_stream[0])


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


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("limit", [None, 8])
def test_broken_images_are_errors_or_skipped_and_counted(tmp_path, cache, limit):
    root = own(tmp_path / "data", "split")
    good = open_stream(DomainFolders, root)
    broken = [root / "day" / "train" / "cat" / "2.png", root / "night" / "test" / "fox" / "0.png"]
    broken[0].write_bytes(b"no image")
    broken[1].write_bytes(b"")
    options = {"limit": limit, **({"cache": tmp_path / "cache"} if cache else {})}
    if cache:
        with pytest.raises(ValueError, match=r"day/train/cat/2.png cannot be decoded"):
            open_stream(DomainFolders, root, **options)
    for _ in range(2):  # the second time from the cache
        with pytest.warns(UserWarning, match=r"2 images cannot be decoded.*cat/2.png"):
            benchmark = DomainFolders(root, skip_broken=True, **options)
        assert benchmark.broken == broken
        lengths = [len(e.dataset) for e in benchmark.train_stream]
        assert lengths == [15, 16]
        assert [len(e.dataset) for e in benchmark.test_stream] == [4, 3]
        assert len(list(benchmark.train_stream[0].dataset)) == 15
    if cache:
        with pytest.raises(ValueError, match=r"day/train/cat/2.png cannot be decoded"):
            open_stream(DomainFolders, root, **options)
    again = open_stream(DomainFolders, root, skip_broken=True, **options)
    left = [row for e in good.train_stream[1:] for row in seen(e)]
    assert left == seen(again.train_stream[1])


def test_a_domain_of_broken_images_alone_is_an_error(tmp_path):
    for part in ("train", "test"):
        paint(tmp_path / "day" / part / "cat" / "0.png", 0)
    (tmp_path / "day" / "test" / "cat" / "0.png").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="1 images cannot be decoded"),
        pytest.raises(ValueError, match="domain 'day' has no images for the 'test' stream"),
    ):
        DomainFolders(tmp_path, skip_broken=True)
