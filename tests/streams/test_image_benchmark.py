"""Image benchmarks: validation split, limits, Avalanche's methods."""

import itertools

import pytest
import torch
from avalanche.training import LwF
from miniature import OWN_CLASSES, OWN_CODES, check_labels, open_stream, own, paint, seen
from torch import nn
from toys import make_naive

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
    options = {"alpha": 1.0, "temperature": 2.0, "train_epochs": 1}
    strategy = make_naive(model, optimizer, cls=LwF, **options)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    strategy.eval(benchmark.test_stream)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_transforms_get_pil_images_or_pixels(tmp_path):
    class OfPixels:
        takes_pixels = True

        def __call__(self, image):
            return image[:, 0, 0].long()

    root = own(tmp_path, "split")
    check_labels(open_stream(DomainFolders, root, eval_transform=OfPixels()), OWN_CODES)
