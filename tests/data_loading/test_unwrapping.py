"""``rows_of`` finds the tensors behind Avalanche's wrappers, or returns None."""

import pytest
import torch
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from torch.overrides import TorchFunctionMode
from torch.utils.data import Subset, TensorDataset, default_collate
from toy_datasets import tensors, wrapped
from toys import tensor_dataset

from covon_avalanche.data_loading import rows_of, unwrapping
from covon_avalanche.streams.permuted import PermutedImages


class OneLabelFlipped:
    """A data set with another label of an example that is not compared."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, 1 - int(y) if index == 1 else int(y)


def subclass(cls, *mixins):
    return type("Own", (*mixins, cls), {})


TENSORS = torch.randn(50, 6), torch.zeros(50).long()
PIXELS = torch.zeros(50, 2, 2, dtype=torch.uint8), torch.zeros(50).long(), torch.arange(4), 255


@pytest.mark.parametrize(
    "make",
    [
        lambda *own: wrapped(subclass(TensorDataset, *own)(*TENSORS)),
        lambda *own: wrapped(subclass(PermutedImages, *own)(*PIXELS)),
        lambda *own: subclass(AvalancheDataset, *own)([TensorDataset(*TENSORS)]),
    ],
    ids=["tensors", "permutation", "outside"],
)
def test_a_subclass_that_overrides_getitem_alone_gives_its_own_rows(make):
    assert rows_of(make()) is not None
    data = make(OneLabelFlipped)
    assert data[1][1] == 1
    assert rows_of(data) is None


def now_and_then(x, seen=[0]):  # noqa: B006
    """Like a rare augmentation with its own generator."""
    seen[0] += 1
    return x + 100 if seen[0] % 40 == 0 else x


def two_tasks():
    """Avalanche balances them."""
    other = torch.randn(9, 6), torch.randint(3, (9,))
    return tensors().concat(tensor_dataset(*other, task_labels=1))


def reversed_columns(examples):
    return default_collate(examples)[::-1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tensors(transform=now_and_then),
        lambda: tensors(transform=now_and_then).freeze_transforms(),
        lambda: tensors(transform=now_and_then).subset([3, 1, 2]).concat(tensors()),
        lambda: wrapped(Subset(TensorDataset(*TENSORS), range(50))),
        two_tasks,
        lambda: AvalancheDataset([TensorDataset(*TENSORS)], collate_fn=reversed_columns),
    ],
    ids=["transform", "frozen", "transform of a part", "no tensors", "tasks", "collate_fn"],
)
def test_data_that_may_be_random_or_composed_otherwise_are_left_to_avalanche(make):
    data = make()
    for _ in range(10):
        assert rows_of(data) is None


class OneDevice(TorchFunctionMode):
    """Refuses tensors of two devices in one call, as CUDA does and "meta" does not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert len({a.device for a in args if isinstance(a, torch.Tensor)}) < 2
        return func(*args, **(kwargs or {}))


def test_tensors_may_lie_on_another_device():
    far, near = torch.empty(5, 2, device="meta"), torch.arange(5)
    with OneDevice():
        batch = unwrapping._columns([far, near], torch.tensor([3, 1]))
    assert [tuple(column.shape) for column in batch] == [(2, 2), (2,)]
    assert batch[1].tolist() == [3, 1]


@pytest.mark.parametrize("name", ["logits", "targets_task_labels"])
def test_examples_with_more_columns_than_task_labels_stay_with_avalanche(name):
    column = DataAttribute([3] * 50, name, use_in_getitem=True)
    data = AvalancheDataset([TensorDataset(*TENSORS)], data_attributes=[column])
    assert (rows_of(data) is None) == (name == "logits")
