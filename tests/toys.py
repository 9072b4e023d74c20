"""Small things that several test modules step through."""

from __future__ import annotations

from inspect import signature

import torch
from avalanche.benchmarks import CLScenario, benchmark_from_datasets, with_classes_timeline
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.benchmarks.utils import _make_taskaware_tensor_classification_dataset
from avalanche.models import IncrementalClassifier
from avalanche.training import Naive
from avalanche.training.plugins import SupervisedPlugin
from torch import nn
from toy_optimizers import make_covon, make_vcl, same, train_step, weights  # noqa: F401

from covon_avalanche import AdaRegPlugin, CoVONPlugin, EWCStarPlugin, VCLPlugin

#: Of inputs and targets.
tensor_dataset = _make_taskaware_tensor_classification_dataset


def toy_benchmark(
    n_experiences: int = 3, n: int = 48, *, classes_per_experience: int | None = None
) -> CLScenario:
    """Gaussian clusters in 8 dimensions, rotated from task to task, or with new classes in each."""
    generator = torch.Generator().manual_seed(0)
    classes = 4 if classes_per_experience is None else n_experiences * classes_per_experience
    centres = 3 * torch.randn(classes, 8, generator=generator)

    def dataset(experience: int):
        if classes_per_experience is None:
            y = torch.arange(n) % classes
            rotated = centres.roll(experience, dims=1)
        else:
            y = experience * classes_per_experience + torch.arange(n) % classes_per_experience
            rotated = centres
        x = rotated[y] + torch.randn(n, 8, generator=generator)
        return tensor_dataset(x, y, task_labels=0)

    streams = {s: [dataset(i) for i in range(n_experiences)] for s in ("train", "test")}
    return with_task_labels(with_classes_timeline(benchmark_from_datasets(**streams)))


def columns(experience) -> tuple[torch.Tensor, torch.Tensor]:
    """All inputs and targets of an experience."""
    rows = list(experience.dataset)
    return torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])


def toy_model() -> nn.Module:
    """Two layers, always the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))


QUIET = dict(train_mb_size=16, train_epochs=2, eval_mb_size=64, evaluator=None)


def make_naive(model: nn.Module, optimizer, *plugins, cls=Naive, **options):
    """Avalanche's fine-tuning, or another of its strategies, with settings for the toy stream."""
    parts = dict(model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss())
    return cls(**parts, plugins=list(plugins), **{**QUIET, **options})


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def sgd_by_part(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    """With groups of head and backbone."""
    groups = [{"params": model.head.parameters()}, {"params": model.backbone.parameters()}]
    return torch.optim.SGD(groups, lr, momentum=0.9, weight_decay=5e-4)


#: By a short name: the plugin, its optimizer, and settings for the toy stream.
STRATEGIES = {
    "covon": (CoVONPlugin, lambda model: make_covon(model.named_parameters()), {}),
    "vcl": (VCLPlugin, lambda model: make_vcl(model.named_parameters()), {}),
    "ada-reg": (AdaRegPlugin, adamw, {"strength": 1e3}),
    "ewc-star": (EWCStarPlugin, adamw, {"strength": 10.0}),
}


MAKE = {"covon": make_covon, "vcl": make_vcl}


def make_strategy(kind: str, model: nn.Module, *, optimizer=None, plugins=(), **options):
    """Avalanche's fine-tuning with each of our plugins, whose settings are among the options."""
    plugin, make, own = STRATEGIES[kind]
    given = {**own, **options}
    ours = {name: given.pop(name) for name in signature(plugin).parameters if name in given}
    return make_naive(model, optimizer or make(model), plugin(**ours), *plugins, **given)


class ToDouble(SupervisedPlugin):
    """Gives a strategy batches in double precision."""

    def before_forward(self, strategy, **kwargs):
        strategy.mbatch[0] = strategy.mbatch[0].double()


class Head(nn.Module):
    """A body and a classifier that grows with the classes seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 10)
        self.head = IncrementalClassifier(10, initial_out_features=2)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


class Watch(SupervisedPlugin):
    """Calls functions of the strategy at Avalanche's callbacks, which are given by name."""

    def __init__(self, **callbacks):
        super().__init__()
        for name, function in callbacks.items():
            setattr(self, name, lambda strategy, f=function, **kwargs: f(strategy))


def train_vcl(plugin, others=(), n_experiences=3, frozen=()):
    torch.manual_seed(5)
    model = toy_model()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    strategy = make_naive(model, make_vcl(model.named_parameters()), plugin, *others)
    torch.manual_seed(5)
    strategy.train(toy_benchmark(n_experiences).train_stream)
    return strategy
