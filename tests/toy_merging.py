"""All rules, a network with all kinds of layers that RegMean merges, and tasks of it."""

import torch
import torch.nn.functional as F
from torch import nn
from toy_optimizers import weights

from covon_avalanche import merging

RULES = {
    "regmean": merging.RegMean,
    "kfac": merging.KFACMerge,
    "average": merging.Average,
    "ema": lambda: merging.EMA(0.5),
    "fisher": merging.FisherMerge,
    "cofima": merging.CoFiMA,
    "magmax": merging.MagMax,
}
"""For any optimizer, by their names in recipes."""


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
    """A task with these inputs, of class 0."""
    y, before = torch.zeros(len(x), dtype=torch.long), before or {}
    return merging.Task(
        model, before, lambda: zip(x.split(batch_size), y.split(batch_size), strict=True)
    )


def merged_by(rule, models, inputs):
    """Merged weights of two tasks: the weights that they left, and their inputs."""
    (before, after), (x0, x1) = models, inputs
    rule.observe(task_of(before, x0))
    return rule.merge(task_of(after, x1, weights(before)))


def end_task(model, rule, values, batches=None) -> None:
    """A task that leaves these weights, by name, and the merge."""
    before = weights(model)
    model.load_state_dict(values, strict=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    merging.merge_into(model, optimizer, rule, before=before, batches=batches)


def accuracies(model, rule, tasks, y, lr, steps):
    """On each task after the last merge; tasks have inputs of their own and the same labels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for x in tasks:
        before = weights(model)
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        merging.merge_into(model, optimizer, rule, before=before, batches=lambda x=x: [(x, y)])
    with torch.no_grad():
        return [(model(x).argmax(1) == y).float().mean().item() for x in tasks]
