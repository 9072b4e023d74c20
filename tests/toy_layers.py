"""A network with all kinds of layers that RegMean merges, and tasks of it."""

import torch
from torch import nn

from covon_avalanche.merging import Task


class Net(nn.Module):
    """Two convolutions, one with groups, and two linear layers, one without a bias."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.second = nn.Conv2d(4, 6, (3, 1), padding="same", groups=2, padding_mode="reflect")
        self.third = nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.second(self.first(x).tanh()).tanh().mean((-2, -1))
        return self.head(self.third(x).tanh())


def images(seed, n=40):
    return torch.randn(n, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def task_of(model, x, before=None, batch_size=10_000):
    """A task with these inputs."""
    return Task(model, before or {}, lambda: [(part, None) for part in x.split(batch_size)])
