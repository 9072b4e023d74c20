"""PermutedDigits and PermutedMNIST: data, permutations, splits, Avalanche conventions."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.datasets import MNIST
from toys import columns

from covon_avalanche.streams import PermutedDigits, PermutedMNIST, permuted


def images(benchmark, experience=0, stream="train"):
    return columns(benchmark.streams[stream][experience])[0]


def as_set(pixels):
    return {tuple(row.flatten().tolist()) for row in pixels}


def test_digits_are_the_real_ones_split_once_and_for_all():
    benchmark = PermutedDigits(1)
    x = torch.cat([images(benchmark), images(benchmark, stream="test")])
    pixels = (x * 0.3760 + 0.3053) * 16
    assert (pixels - pixels.round()).abs().max() < 1e-4
    assert as_set(pixels.round()) == as_set(torch.from_numpy(load_digits().data))
    assert (len(images(benchmark)), len(images(benchmark, stream="test"))) == (1437, 360)
    again = PermutedDigits(1, seed=5)
    assert torch.equal(images(again, stream="test"), images(benchmark, stream="test"))
    targets = torch.tensor(list(benchmark.test_stream[0].dataset.targets))
    assert targets.bincount().min() >= 34  # stratified
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01


def column_order(natural, permuted):
    """Some order of the natural columns that gives the permuted ones."""
    columns = {tuple(c.tolist()): i for i, c in enumerate(natural.flatten(1).T)}
    return [columns[tuple(c.tolist())] for c in permuted.flatten(1).T]


def test_the_first_experience_is_natural_and_the_others_are_permuted():
    """One order of the columns for training and test, another one in each experience."""
    benchmark = PermutedDigits(3, seed=3, validation_size=1237)
    natural = torch.cat([images(benchmark), images(benchmark, stream="test")])
    orders = []
    for i in (1, 2):
        x = torch.cat([images(benchmark, i), images(benchmark, i, "test")])
        orders.append(tuple(column_order(natural, x)))
        assert torch.equal(x.flatten(1), natural.flatten(1)[:, orders[-1]])
        assert torch.equal(x.flatten(1).sort().values, natural.flatten(1).sort().values)
        targets = [list(benchmark.train_stream[k].dataset.targets) for k in (0, i)]
        assert targets[0] == targets[1]
    assert len({*orders, tuple(column_order(natural, natural))}) == 3
    natural, first = (images(benchmark, i, "test") for i in (0, 1))
    assert torch.equal(images(PermutedDigits(2, seed=3), 1, "test"), first)
    assert not torch.equal(images(PermutedDigits(2, seed=4), 1, "test"), first)
    both = PermutedDigits(2, seed=3, permute_first=True)
    found = images(both, stream="test")
    assert not torch.equal(found, natural)
    assert torch.equal(found.flatten(1).sort().values, natural.flatten(1).sort().values)
    assert torch.equal(images(both, 1, "test"), first)


@pytest.mark.parametrize(("size", "held_out"), [(237, 237), (0.25, 359)])
def test_validation_images_are_held_out_of_training_and_alike_in_all_domains(size, held_out):
    benchmark = PermutedDigits(3, validation_size=size)
    for i in range(3):
        assert len(benchmark.streams["valid"][i].dataset) == held_out
        assert len(benchmark.train_stream[i].dataset) == 1437 - held_out
    x = torch.cat([images(benchmark), images(benchmark, stream="valid")])
    assert as_set(x) == as_set(images(PermutedDigits(1)))
    targets = [list(benchmark.streams["valid"][i].dataset.targets) for i in (0, 2)]
    assert targets[0] == targets[1]
    assert "valid" not in PermutedDigits(1).streams


def test_transforms_get_the_permuted_image_in_0_1():
    seen = []

    def transform(image):
        seen.append(image)
        return image * 0

    benchmark = PermutedDigits(2, validation_size=10, train_transform=transform)
    assert (benchmark.train_stream[1].dataset[0][0] == 0).all()
    assert seen[0].shape == (1, 8, 8)
    assert seen[0].min() >= 0
    assert 0.5 < seen[0].max() <= 1
    plain = PermutedDigits(2, validation_size=10)
    for stream in ("test", "valid"):  # not the training transform there
        torch.testing.assert_close(images(benchmark, 1, stream), images(plain, 1, stream))
    assert (benchmark.train_stream[1].dataset.eval()[0][0] != 0).any()
    other = PermutedDigits(1, eval_transform=lambda image: image + 7)
    assert images(other, stream="test").min() >= 7


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (0, {}, "n_experiences must be an integer >= 1, got 0"),
        (1, {"validation_size": 1437}, "validation_size must be .* below 1437, got 1437"),
        (1, {"validation_size": -1}, "validation_size must be .* below 1437, got -1"),
        (1, {"validation_size": 1.0}, "validation_size must be .* below 1437, got 1.0"),
    ],
)
def test_values_out_of_range_are_refused(n, options, message):
    with pytest.raises(ValueError, match=message):
        PermutedDigits(n, **options)


class SlowMNIST:
    """Images that take a while to download, and cannot be read meanwhile."""

    def __init__(self, root, train, download=False):
        if not (root / "whole").exists():
            if not download:
                there = (root / "begun").exists()
                raise ValueError("half a file") if there else RuntimeError("Dataset not found.")
            (root / "begun").touch(exist_ok=False)  # by one process alone
            time.sleep(0.2)
            (root / "whole").touch()
        self.data, self.targets = torch.zeros(3, 2, 2, dtype=torch.uint8), torch.arange(3)


def test_one_process_downloads_and_the_others_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(permuted, "MNIST", SlowMNIST)
    root = tmp_path / "new"
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda i: PermutedMNIST(1, dataset_root=root), range(4)))
    assert [len(benchmark.train_stream[0].dataset) for benchmark in made] == [3] * 4
    for file in root.glob(".*.lock"):
        file.unlink()
    PermutedMNIST(1, dataset_root=root)
    assert sorted(p.name for p in root.iterdir()) == ["begun", "whole"]  # may be read-only


def test_real_mnist(real_data):
    benchmark = PermutedMNIST(2, seed=1, dataset_root=real_data("MNIST/raw"))
    assert [len(e.dataset) for e in benchmark.train_stream] == [60_000, 60_000]
    assert [len(e.dataset) for e in benchmark.test_stream] == [10_000, 10_000]
    original = MNIST(real_data("MNIST/raw"), train=False)
    image, label, task = benchmark.test_stream[0].dataset[7]
    assert (label, task) == (original.targets[7].item(), 0)
    pixels = image[0] * 0.3081 + 0.1307
    torch.testing.assert_close(pixels, original.data[7] / 255, atol=1e-6, rtol=0)
    permuted = benchmark.test_stream[1].dataset[7][0]
    assert torch.equal(permuted.flatten().sort().values, image.flatten().sort().values)
    assert not torch.equal(permuted, image)
