"""PermutedDigits and PermutedMNIST: data, permutations, splits, Avalanche conventions."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.datasets import MNIST

from covon_avalanche.streams import PermutedDigits, PermutedMNIST, permuted


def tensors(experience):
    rows = [experience.dataset[i] for i in range(len(experience.dataset))]
    return torch.stack([r[0] for r in rows]), torch.tensor([r[1] for r in rows])


def test_digits_are_the_real_ones_split_once_and_for_all():
    benchmark = PermutedDigits(1)
    x = torch.cat([tensors(benchmark.train_stream[0])[0], tensors(benchmark.test_stream[0])[0]])
    pixels = (x * 0.3760 + 0.3053) * 16
    assert (pixels - pixels.round()).abs().max() < 1e-4
    images = {tuple(row.flatten().round().int().tolist()) for row in pixels}
    original = {tuple(row.tolist()) for row in load_digits().data.astype(int)}
    assert images == original
    assert (len(benchmark.train_stream[0].dataset), len(benchmark.test_stream[0].dataset)) == (
        1437,
        360,
    )
    again = PermutedDigits(1, seed=5)
    assert torch.equal(tensors(again.test_stream[0])[0], tensors(benchmark.test_stream[0])[0])
    counts = tensors(benchmark.test_stream[0])[1].bincount()
    assert counts.min() >= 34  # stratified
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01


def test_permutations():
    """The first experience is natural, the others are the same images in other orders."""
    benchmark = PermutedDigits(4, seed=3)
    natural, labels = tensors(benchmark.train_stream[0])
    natural_test, _ = tensors(benchmark.test_stream[0])
    seen = []
    for i in range(1, 4):
        x, y = tensors(benchmark.train_stream[i])
        test, _ = tensors(benchmark.test_stream[i])
        assert torch.equal(y, labels)
        assert not torch.equal(x, natural)
        # the same columns in another order, one order for training and test
        order = column_order(torch.cat([natural, natural_test]), torch.cat([x, test]))
        assert torch.equal(x.flatten(1), natural.flatten(1)[:, order])
        assert torch.equal(test.flatten(1), natural_test.flatten(1)[:, order])
        assert torch.equal(x.flatten(1).sort().values, natural.flatten(1).sort().values)
        seen.append(tuple(order))
    assert len(set(seen)) == 3
    same = PermutedDigits(2, seed=3)
    assert torch.equal(tensors(same.train_stream[1])[0], tensors(benchmark.train_stream[1])[0])
    other = PermutedDigits(2, seed=4)
    assert not torch.equal(tensors(other.train_stream[1])[0], tensors(benchmark.train_stream[1])[0])


def test_permutations_may_come_back():
    stream = PermutedDigits(5, n_permutations=2, seed=3).train_stream
    natural, permuted = (tensors(e)[0] for e in PermutedDigits(2, seed=3).train_stream)
    for i, experience in enumerate(stream):
        assert torch.equal(tensors(experience)[0], permuted if i % 2 else natural)
    for wrong in (0, 6):
        with pytest.raises(ValueError, match=f"from 1 to n_experiences = 5, got {wrong}"):
            PermutedDigits(5, n_permutations=wrong)


def test_the_first_experience_may_be_permuted_too():
    streams = [PermutedDigits(2, permute_first=p).train_stream for p in (False, True)]
    natural, permuted = (tensors(stream[0])[0] for stream in streams)
    assert not torch.equal(natural, permuted)
    assert torch.equal(natural.flatten(1).sort().values, permuted.flatten(1).sort().values)
    assert torch.equal(*(tensors(stream[1])[0] for stream in streams))


def column_order(natural, permuted):
    """Some order of the natural columns that gives the permuted ones."""
    columns = {tuple(c.tolist()): i for i, c in enumerate(natural.flatten(1).T)}
    return [columns[tuple(c.tolist())] for c in permuted.flatten(1).T]


@pytest.mark.parametrize(("size", "images"), [(237, 237), (0.25, 359)])
def test_validation_images_are_held_out_of_training_and_alike_in_all_domains(size, images):
    benchmark = PermutedDigits(3, validation_size=size)
    valid = benchmark.streams["valid"]
    whole, _ = tensors(PermutedDigits(1).train_stream[0])
    for i in range(3):
        assert len(valid[i].dataset) == images
        assert len(benchmark.train_stream[i].dataset) == 1437 - images
    x = torch.cat([tensors(benchmark.train_stream[0])[0], tensors(valid[0])[0]])
    assert {tuple(r.flatten().tolist()) for r in x} == {tuple(r.flatten().tolist()) for r in whole}
    assert torch.equal(tensors(valid[0])[1], tensors(valid[2])[1])
    assert "valid" not in PermutedDigits(1).streams


def test_avalanche_conventions():
    """Task label 0, classes timeline, n_classes: Avalanche's methods and metrics need them."""
    benchmark = PermutedDigits(2)
    assert benchmark.n_classes == 10
    for stream in (benchmark.train_stream, benchmark.test_stream):
        for i, experience in enumerate(stream):
            assert experience.current_experience == i
            assert experience.task_label == 0
            assert experience.task_labels == [0]
            assert set(experience.classes_in_this_experience) == set(range(10))
            assert experience.dataset[0][-1] == 0
    assert benchmark.train_stream[1].previous_classes == set(range(10))


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
        got = benchmark.streams[stream][1].dataset[0][0]
        torch.testing.assert_close(got, plain.streams[stream][1].dataset[0][0])
    assert (benchmark.train_stream[1].dataset.eval()[0][0] != 0).any()
    other = PermutedDigits(1, eval_transform=lambda image: image + 7)
    assert other.test_stream[0].dataset[0][0].min() >= 7


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="n_experiences must be >= 1, got 0"):
        PermutedDigits(0)
    for size in (1437, -1, 1.0):
        with pytest.raises(ValueError, match=r"validation_size must be .* below 1437, got"):
            PermutedDigits(1, validation_size=size)


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
    torch.testing.assert_close(
        image[0] * 0.3081 + 0.1307, original.data[7] / 255, atol=1e-6, rtol=0
    )
    permuted = benchmark.test_stream[1].dataset[7][0]
    assert torch.equal(permuted.flatten().sort().values, image.flatten().sort().values)
    assert not torch.equal(permuted, image)
