"""Data sets of tensors, and loaders for them, for tests of data loading."""

import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.supervised import Naive
from torch import nn
from toys import make_naive, sgd, tensor_dataset

from covon_avalanche import TensorBatches
from covon_avalanche.streams import PermutedDigits


def digits():
    return PermutedDigits(2, validation_size=1235).train_stream[1].dataset


def tensors(n=50, transform=None):
    x, y = torch.randn(n, 6), torch.randint(3, (n,))
    groups = {"train": (transform, None), "eval": (None, None)}
    return tensor_dataset(x, y, task_labels=0, transform_groups=groups)


def wrapped(data):
    return AvalancheDataset([data])


class FastNaive(TensorBatches, Naive):
    pass


def loader(kind, data, *, train=True, **options):
    model = nn.Linear(1, 1)
    made = make_naive(model, sgd(model), cls=kind, train_mb_size=8, eval_mb_size=8)
    made.experience = with_task_labels(benchmark_from_datasets(train=[data])).train_stream[0]
    made.adapted_dataset = data
    (made.make_train_dataloader if train else made.make_eval_dataloader)(**options)
    return made.dataloader
