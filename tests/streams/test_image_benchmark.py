"""Image benchmarks: validation split, limits, Avalanche's methods."""

import itertools

import pytest
import torch
from miniature import OWN_CLASSES, OWN_CODES, check_labels, open_stream, own, paint, seen

from covon_avalanche.streams import DomainFolders


def test_validation_images_are_held_out_class_by_class(tmp_path):
    benchmark = open_stream(DomainFolders, own(tmp_path, "split"), validation_size=0.25)
    check_labels(benchmark, OWN_CODES)
    for kept, held_out in zip(benchmark.train_stream, benchmark.streams["valid"], strict=True):
        assert (len(kept.dataset), len(held_out.dataset)) == (12, 4)
        counts = torch.tensor(list(held_out.dataset.targets)).bincount()
        assert sorted(counts[counts > 0].tolist()) == [2, 2]


def test_small_classes_hold_out_one_validation_image(tmp_path):
    """A tenth of four images is none; a single image stays for training."""
    for number, name in enumerate(OWN_CLASSES, start=1):
        for part, i in itertools.product(("train", "test"), range(number)):
            paint(tmp_path / "day" / part / name / f"{i}.png", number - 1, OWN_CODES["day"])
    benchmark = open_stream(DomainFolders, tmp_path, validation_size=0.1)
    check_labels(benchmark, OWN_CODES)
    labels = [sorted(benchmark.images[s]["day"].labels) for s in ("train", "valid")]
    assert labels == [[0, 1, 2, 2], [1, 2]]


def numbered(root):
    """Twelve training and six test images of two classes; a colour tells an image's number."""
    for part, n in (("train", 12), ("test", 6)):
        for (label, name), i in itertools.product(enumerate(("cat", "dog")), range(n)):
            paint(root / "day" / part / name / f"{i:02d}.png", label, i)
    return root


def in_use(root, **options):
    """Class and number of each image in use, by stream."""
    benchmark = open_stream(DomainFolders, root, **options)
    return {
        name: [(label, number) for label, _, number in seen(stream[0])]
        for name, stream in benchmark.streams.items()
    }


@pytest.mark.parametrize("validation_size", [0, 0.25])
def test_a_limit_of_the_training_stream_leaves_the_others_whole(tmp_path, validation_size):
    options = {"validation_size": validation_size, "seed": 3}
    whole = in_use(numbered(tmp_path), **options)
    few = in_use(tmp_path, train_limit=4, **options)
    for _ in range(2):  # without and with a cache file
        assert in_use(tmp_path, train_limit=4, cache=tmp_path / ".cache", **options) == few
    train, before = few.pop("train"), whole.pop("train")
    assert few == whole
    assert [label for label, _ in train] == [0] * 4 + [1] * 4
    assert set(train) < set(before)
    assert len(set(train)) == 8
    many = in_use(tmp_path, train_limit=100, **options)
    assert many == {"train": before, **whole}


def test_the_choice_within_a_limit_is_seeded(tmp_path):
    numbered(tmp_path)
    drawn = {seed: in_use(tmp_path, train_limit=3, seed=seed)["train"] for seed in (1, 2**62)}
    for seed, images in drawn.items():
        expected = []
        for label in (0, 1):
            generator = torch.Generator().manual_seed((1_000_003 * seed + label) % 2**64)
            order = torch.randperm(12, generator=generator)[:3].sort().values
            expected += [(label, number) for number in order.tolist()]
        assert images == expected
    assert drawn[1] != drawn[2**62]


def test_limit_holds_for_all_streams_and_with_both_the_smaller_one_for_training(tmp_path):
    options = {"validation_size": 0.5, "limit": 3}
    every = in_use(numbered(tmp_path), **options)
    assert {name: len(images) for name, images in every.items()} == dict.fromkeys(every, 6)
    assert in_use(tmp_path, train_limit=5, **options) == every
    fewer = in_use(tmp_path, train_limit=2, **options)
    assert len(fewer["train"]) == 4
    assert set(fewer["train"]) < set(every["train"])
    assert (fewer["valid"], fewer["test"]) == (every["valid"], every["test"])


def test_transforms_get_pil_images_or_pixels(tmp_path):
    class OfPixels:
        takes_pixels = True

        def __call__(self, image):
            return image[:, 0, 0].long()

    root = own(tmp_path, "split")
    check_labels(open_stream(DomainFolders, root, eval_transform=OfPixels()), OWN_CODES)
