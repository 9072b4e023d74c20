"""Small things that several test modules step through."""

from __future__ import annotations

import torch
from avalanche.benchmarks import CLScenario, benchmark_from_datasets, with_classes_timeline
from avalanche.benchmarks.scenarios import split_online_stream
from avalanche.benchmarks.scenarios.task_aware import with_task_labels
from avalanche.benchmarks.utils import _make_taskaware_tensor_classification_dataset
from avalanche.models import IncrementalClassifier
from avalanche.training import Naive
from avalanche.training.plugins import SupervisedPlugin
from torch import nn
from toy_optimizers import make_covon, make_vcl, same, train_step, weights  # noqa: F401

from covon_avalanche import AdaRegStrategy, CoVONStrategy, EWCStarStrategy, VCLStrategy


def toy_benchmark(
    n_experiences: int = 3, n: int = 48, *, classes_per_experience: int | None = None
) -> CLScenario:
    """Gaussian clusters in 8 dimensions, rotated from one experience to the next.

    With ``classes_per_experience`` the classes are split instead (class-incremental).
    """
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
        return _make_taskaware_tensor_classification_dataset(x, y, task_labels=0)

    streams = {s: [dataset(i) for i in range(n_experiences)] for s in ("train", "test")}
    return with_task_labels(with_classes_timeline(benchmark_from_datasets(**streams)))


def toy_parts(n_experiences: int, size: int = 16, *, boundaries: bool = True):
    """The toy benchmark as an online stream: each task in parts."""
    stream = toy_benchmark(n_experiences).train_stream
    return split_online_stream(stream, experience_size=size, access_task_boundaries=boundaries)


def columns(experience) -> tuple[torch.Tensor, torch.Tensor]:
    """All inputs and targets of an experience."""
    rows = list(experience.dataset)
    return torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])


def plain_loop(optimizer, model, experiences, epochs: int = 2) -> None:
    """The steps of a ``QUIET`` strategy with a posterior optimizer, without shuffling."""
    for experience in experiences:
        x, y = columns(experience)
        for _ in range(epochs):
            for batch in zip(x.split(16), y.split(16), strict=True):
                train_step(optimizer, model, batch)
        optimizer.consolidate()


def toy_model() -> nn.Module:
    """Two layers, always the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))


QUIET = dict(train_mb_size=16, train_epochs=2, eval_mb_size=64, evaluator=None)


def make_naive(model: nn.Module, optimizer, *plugins, cls=Naive, **options):
    """Avalanche's fine-tuning, or another of its strategies, with settings for the toy stream."""
    return cls(
        model=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        plugins=list(plugins),
        **{**QUIET, **options},
    )


def make_strategy(kind: str, model: nn.Module, **options):
    """Each of our strategies by a short name, with settings for the toy stream."""
    options = {**QUIET, **options}
    match kind:
        case "covon":
            return CoVONStrategy(
                model=model, optimizer=make_covon(model.named_parameters()), **options
            )
        case "vcl":
            return VCLStrategy(model=model, optimizer=make_vcl(model.named_parameters()), **options)
        case "ada-reg":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            return AdaRegStrategy(model=model, optimizer=optimizer, strength=1e3, **options)
        case "ewc-star":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            return EWCStarStrategy(model=model, optimizer=optimizer, strength=10.0, **options)


STRATEGIES = ("covon", "vcl", "ada-reg", "ewc-star")


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
    """Calls a function at the beginning of each experience, and once in its first step."""

    def __init__(self, at_start=None, at_loss=None):
        super().__init__()
        self.at_start, self.at_loss = at_start, at_loss

    def before_training_epoch(self, strategy, **kwargs):
        if self.at_start is not None and strategy.clock.train_exp_epochs == 0:
            self.at_start(strategy)

    def before_backward(self, strategy, **kwargs):
        if self.at_loss is not None:
            self.at_loss(strategy)


def train_vcl(plugin, others=(), n_experiences=3, frozen=()):
    torch.manual_seed(5)
    model = toy_model()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    strategy = make_naive(model, make_vcl(model.named_parameters()), plugin, *others)
    torch.manual_seed(5)
    for experience in toy_benchmark(n_experiences).train_stream:
        strategy.train(experience)
    return strategy
