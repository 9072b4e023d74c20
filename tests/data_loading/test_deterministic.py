"""What may be random is never cached in training."""

import pytest
import torch
from avalanche.benchmarks.classic.cmnist import PixelsPermutation
from avalanche.benchmarks.utils import (
    AvalancheDataset,
    _make_taskaware_tensor_classification_dataset,
)
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import FakeData
from torchvision.transforms import Compose, ToTensor
from torchvision.transforms.v2 import Compose as Compose2
from torchvision.transforms.v2 import Identity
from toy_datasets import FastNaive, Pictures, Scale, loader, never_seen_to_change, pictures, tensors

from covon_avalanche.data_loading import ExampleCache, TensorLoader, rows_of
from covon_avalanche.streams import PermutedDigits

PERMUTATION = PixelsPermutation(torch.arange(48).flip(0))


class Augmented(Pictures):
    """Chance has a part in it, which no attribute called transform tells."""

    deterministic = False

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return never_seen_to_change(x), y


@pytest.mark.parametrize(
    "make",
    [
        lambda: Augmented(),
        lambda: Subset(Augmented(), range(20)),
        lambda: ConcatDataset([Pictures(), Augmented()]),
        lambda: ConcatDataset([Pictures(), Pictures(transform=never_seen_to_change)]),
        lambda: Subset(tensors(transform=never_seen_to_change), range(20)),
    ],
    ids=["itself", "subset", "concatenation", "its transform", "Avalanche's in a subset"],
)
def test_a_dataset_that_may_be_random_is_never_frozen_in_training(make):
    data = AvalancheDataset([make()])
    for _ in range(10):
        assert rows_of(data, ExampleCache(2**20)) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: tensors(transform=never_seen_to_change),
        lambda: tensors(transform=Compose([Scale(), never_seen_to_change])),
        lambda: tensors(transform=Compose2([Identity(), never_seen_to_change])),
        lambda: tensors(transform=never_seen_to_change).freeze_transforms(),
        lambda: pictures(never_seen_to_change),
        lambda: tensors(transform=never_seen_to_change).subset([3, 1, 2]).concat(tensors()),
    ],
)
def test_a_transform_that_may_be_random_is_never_frozen_in_training(make):
    data = make()
    for _ in range(10):
        assert rows_of(data, ExampleCache(2**20)) is None
    assert not isinstance(loader(FastNaive, data), TensorLoader)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FakeData(20, (3, 4, 4), transform=ToTensor()),
        lambda: FakeData(20, (3, 4, 4), transform=Compose([ToTensor(), PERMUTATION])),
        lambda: ConcatDataset([Subset(Pictures(), range(20)), Pictures()]),
        lambda: Subset(tensors(transform=Scale()), range(20)),
    ],
    ids=["torchvision", "permuted pixels", "parts", "Avalanche's in a subset"],
)
def test_known_datasets_are_kept_in_training(make):
    assert rows_of(AvalancheDataset([make()]), ExampleCache(2**20)) is not None


def test_transforms_for_evaluation_are_trusted():
    transform = {"train": (lambda x: -x, None), "eval": (lambda x: x / 2, None)}
    data = _make_taskaware_tensor_classification_dataset(
        torch.randn(9, 6), torch.zeros(9).long(), task_labels=0, transform_groups=transform
    )
    assert rows_of(data, ExampleCache(2**20)) is None
    assert rows_of(data.eval(), ExampleCache(2**20)) is not None


def test_our_digits_are_kept_behind_transforms():
    for options in ({"eval_transform": Scale()}, {"train_transform": Scale()}):
        data = PermutedDigits(2, **options).train_stream[1].dataset
        assert rows_of(data, ExampleCache(2**30)) is not None
