"""The examples behind Avalanche's wrappers, or none."""

import pytest
import torch
from avalanche.benchmarks import SplitMNIST
from avalanche.benchmarks.utils import (
    AvalancheDataset,
    _make_taskaware_classification_dataset,
    _make_taskaware_tensor_classification_dataset,
)
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset, default_collate
from toy_datasets import pictures, tensors, wrapped

from covon_avalanche import TensorBatches
from covon_avalanche.data_loading import ExampleCache, rows_of
from covon_avalanche.streams.permuted import PermutedImages


def test_data_that_changes_behind_the_wrapper_is_not_taken_from_memory():
    data = pictures()
    kept = ExampleCache(2**20)
    rows_of(data, kept)
    data._flat_data._datasets[0].x += 1
    assert rows_of(data, kept) is None


def test_several_tasks_are_balanced_by_avalanche():
    two = tensors().concat(
        _make_taskaware_tensor_classification_dataset(
            torch.randn(9, 6), torch.randint(3, (9,)), task_labels=1
        )
    )
    assert rows_of(two, ExampleCache(2**20)) is None


class OneLabelFlipped:
    """Between two probes."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, 1 - int(y) if index == 1 else int(y)


class FlippedTensors(OneLabelFlipped, TensorDataset):
    pass


class FlippedPermutation(OneLabelFlipped, PermutedImages):
    pass


def flipped_tensors():
    return wrapped(FlippedTensors(torch.randn(50, 6), torch.zeros(50).long()))


def flipped_permutation():
    pixels, order = torch.zeros(50, 2, 2, dtype=torch.uint8), torch.arange(4)
    return wrapped(FlippedPermutation(pixels, torch.zeros(50).long(), order, 255))


def flipped_outside():
    class Flipped(OneLabelFlipped, AvalancheDataset):
        pass

    return Flipped([TensorDataset(torch.randn(50, 6), torch.zeros(50).long())])


@pytest.mark.parametrize("make", [flipped_tensors, flipped_permutation, flipped_outside])
def test_a_subclass_that_overrides_getitem_gives_its_own_rows(make):
    data = make()
    rows = rows_of(data, ExampleCache(0))
    assert data[1][1] == 1
    assert rows is None


def test_a_subclass_may_override_the_batch_as_well():
    class Flipped(FlippedPermutation):
        def tensor_batch(self, indices):
            x, y = super().tensor_batch(indices)
            return x, torch.where(indices == 1, 1 - y, y)

        def __getitem__(self, index):
            x, y = self.tensor_batch(torch.tensor([index]))
            return x[0], int(y)

    pixels, order = torch.zeros(50, 2, 2, dtype=torch.uint8), torch.arange(4)
    data = wrapped(Flipped(pixels, torch.zeros(50).long(), order, 255))
    _, y = rows_of(data, ExampleCache(0)).tensor_batch(torch.arange(3))
    assert y.tolist() == [0, 1, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_on_a_gpu_stay_there():
    x, y = torch.randn(50, 6, device="cuda"), torch.randint(3, (50,), device="cuda")
    for data in (
        AvalancheDataset([TensorDataset(x, y)]),
        _make_taskaware_tensor_classification_dataset(x, y, task_labels=0),
    ):
        batch = rows_of(data, ExampleCache(2**20)).tensor_batch(torch.tensor([7, 2]))
        want = data.collate_fn([data[7], data[2]])
        for a, b in zip(batch, want, strict=True):
            assert a.device == b.device
            assert torch.equal(a, b)


class Sentences(Dataset):
    """Token ids, as many as a function of the index tells."""

    deterministic = True

    def __init__(self, length, n=600):
        self.length, self.targets = length, [0] * n

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return torch.full((self.length(index),), index), 0


def padded(examples):
    x, y, t = zip(*examples, strict=True)
    return [pad_sequence(x, batch_first=True), torch.tensor(y), torch.tensor(t)]


def test_a_collate_function_that_changes_nothing_costs_nothing():
    data = Sentences(lambda i: 3, 20)
    data = _make_taskaware_classification_dataset(
        data, task_labels=0, targets=data.targets, collate_fn=padded
    )
    x, *_ = rows_of(data, ExampleCache(2**20)).tensor_batch(torch.tensor([4, 2]))
    assert x.tolist() == [[4] * 3, [2] * 3]


def test_batches_that_depend_on_their_other_examples_stay_with_avalanche():
    def shortened(examples):
        x, y = default_collate(examples)
        return [x[:, : int((x > 0).sum(1).max())], y]

    x = torch.ones(50, 6)
    x[10:, 4:] = 0
    data = AvalancheDataset([TensorDataset(x, torch.zeros(50).long())], collate_fn=shortened)
    assert rows_of(data, ExampleCache(2**20)) is None


@pytest.mark.parametrize(
    ("values", "fast"),
    [
        (list(torch.randn(50, 4)), True),
        ([float(i) for i in range(50)], True),
        ([[0.5, i] for i in range(50)], False),
        ([torch.ones(1 + i % 2) for i in range(50)], False),
    ],
    ids=["vectors", "numbers", "lists", "different shapes"],
)
def test_attributes_are_given_as_avalanche_gives_them(values, fast):
    logits = DataAttribute(values, "logits", use_in_getitem=True)
    data = TensorDataset(torch.randn(50, 6), torch.zeros(50).long())
    data = AvalancheDataset([data], data_attributes=[logits])
    rows = rows_of(data, ExampleCache(0))
    assert (rows is not None) == fast
    if fast:
        want = data.collate_fn([data[4], data[2]])
        batch = rows.tensor_batch(torch.tensor([4, 2]))
        assert all(torch.equal(a, b) for a, b in zip(batch, want, strict=True))


def fast(kind):
    return type(f"Fast{kind.__name__}", (TensorBatches, kind), {})


def test_avalanches_own_benchmarks(real_data):
    """SplitMNIST with its PIL images and deterministic transforms."""
    benchmark = SplitMNIST(5, dataset_root=real_data("MNIST/raw"))
    data = benchmark.train_stream[0].dataset
    small = data.subset(range(200))
    kept = ExampleCache(2**30)
    assert rows_of(small, kept) is not None  # in training, too
    rows = rows_of(small.eval(), kept)
    x, y, t = rows.tensor_batch(torch.tensor([150, 0]))
    want = [small.eval()[i] for i in (150, 0)]
    assert all(torch.equal(a, b[0]) for a, b in zip(x, want, strict=True))
    assert y.tolist() == [int(w[1]) for w in want]
    assert t.tolist() == [int(w[2]) for w in want]
