"""Data sets of tensors and of images, and loaders for them, for tests of data loading."""

import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.benchmarks.utils import (
    AvalancheDataset,
    _make_taskaware_tensor_classification_dataset,
)
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from torch import nn
from torch.utils.data import Dataset

from covon_avalanche import TensorBatches
from covon_avalanche.streams import PermutedDigits


class Pictures(Dataset):
    """Like a folder of images: rows one by one."""

    def __init__(self, n=50):
        self.x = torch.randint(256, (n, 3, 4, 4), dtype=torch.uint8)
        self.targets = torch.randint(3, (n,)).tolist()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.x[index], self.targets[index]


def digits():
    return PermutedDigits(2, validation_size=100).train_stream[1].dataset


def tensors(n=50, transform=None):
    x, y = torch.randn(n, 6), torch.randint(3, (n,))
    return _make_taskaware_tensor_classification_dataset(
        x, y, task_labels=0, transform_groups={"train": (transform, None), "eval": (None, None)}
    )


def wrapped(data):
    return AvalancheDataset([data])


class FastNaive(TensorBatches, Naive):
    pass


def loader(kind, data, *, train=True, **options):
    model = nn.Linear(1, 1)
    made = kind(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_mb_size=8,
        evaluator=EvaluationPlugin(),
    )
    made.experience = with_task_labels(benchmark_from_datasets(train=[data])).train_stream[0]
    made.adapted_dataset = data
    made.eval_mb_size = 8
    (made.make_train_dataloader if train else made.make_eval_dataloader)(**options)
    return made.dataloader
