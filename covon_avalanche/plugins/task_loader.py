"""Passes over a task's data outside training, for example for the Fisher information."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from avalanche.benchmarks import OnlineCLExperience
from avalanche.models import MultiTaskModule
from torch import Tensor
from torch.utils.data import DataLoader

from covon_avalanche.data_loading import rows_of
from covon_avalanche.last_layer import penultimate_features
from covon_avalanche.optim import PosteriorOptimizer
from covon_avalanche.posterior.fisher import in_mode

SECOND_MOMENTS_MB_SIZE = 64
"""Batch size of passes that may measure second moments."""


def check_whole_task(experience: Any) -> None:
    """Raise a ``ValueError`` for an experience of an online stream, which is a part of a task."""
    if isinstance(experience, OnlineCLExperience):
        raise ValueError(
            "the experiences of this online stream are parts of tasks, and each would end like a "
            "whole task: train on the experiences of the original stream, or use "
            "CoVONPlugin(consolidate_every=...)"
        )


def check_one_head(plugin: Any, model: Any, advice: str = "") -> None:
    """Raise a ``ValueError`` for a model with a head for each task."""
    if isinstance(model, MultiTaskModule):
        raise ValueError(
            f"{type(plugin).__name__} needs one head for all tasks, got {type(model).__name__}"
            f"{advice}"
        )


def begin_domain(strategy: Any, kind: type[Any], needs: str, hint: str, no_prior: str = "") -> None:
    """Begin a domain of a model that counts them, in place of one whose training was interrupted,
    with a new state of the optimizer, unless that is a posterior.

    :param kind: the class that the model must have.
    :param needs: the sentence on another model, which ``hint`` ends.
    :param no_prior: why a posterior is refused; by default it is not.
    :raises ValueError: for an online stream, another kind of model, or a posterior.
    """
    model, optimizer = strategy.model, strategy.optimizer
    check_whole_task(strategy.experience)
    if not isinstance(model, kind):
        raise ValueError(f"{needs}, got {type(model).__name__}: {hint}")
    posterior = isinstance(optimizer, PosteriorOptimizer)
    if posterior and no_prior:
        name = type(optimizer).__name__
        raise ValueError(f"{no_prior}: use an optimizer without a posterior, got {name}")
    if model.in_domain:
        model.domains -= 1
    model.begin_domain()
    model.in_domain = True
    if not posterior:
        optimizer.state.clear()


def task_autocast(strategy: Any) -> AbstractContextManager[Any]:
    """The precision of passes over data: the strategy's ``autocast_dtype``, if it has one, as with
    :class:`covon_avalanche.loops.Autocast`."""
    if hasattr(strategy, "autocast_dtype"):
        return torch.autocast(strategy.device.type, strategy.autocast_dtype)
    return nullcontext()


def task_loader(
    strategy: Any, mb_size: int, *, shuffled: bool = False, augmented: bool = False
) -> Iterator[list[Tensor]]:
    """Iterate over the data that the strategy trains on, with the evaluation transform; see
    :func:`dataset_loader`.

    :param augmented: with the training transform, and shuffled anew by torch's global generator.
    """
    data = strategy.adapted_dataset
    if augmented:
        seed = int(torch.randint(2**31, (), device="cpu"))
        return dataset_loader(data.train(), strategy, mb_size, shuffled=True, seed=seed)
    return dataset_loader(data.eval(), strategy, mb_size, shuffled=shuffled)


def dataset_loader(
    data: Any, strategy: Any, mb_size: int, *, shuffled: bool = False, seed: int = 0
) -> Iterator[list[Tensor]]:
    """Iterate over a dataset as ``(x, y)``, with task labels if the model takes them: the
    ``mb_x``, ``mb_y`` and ``mb_task_id`` of the strategy.

    :param shuffled: in random order, the same each time, and without the last batch if it is
        incomplete (unless it is the only one); by default in the dataset's order.
    :param seed: of the random order.
    """
    order = torch.arange(len(data), device="cpu")
    if shuffled:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(data), generator=generator, device="cpu")
        order = order[: max(len(data) // mb_size * mb_size, mb_size)]
    rows, collate = rows_of(data), getattr(data, "collate_fn", None)
    batches: Iterable[Sequence[Tensor]] = (
        DataLoader(data, batch_size=mb_size, sampler=order.tolist(), collate_fn=collate)
        if rows is None
        else map(rows, order.split(mb_size))
    )
    for batch in batches:
        yield _unpacked(batch, strategy)


def _unpacked(batch: Sequence[Tensor], strategy: Any) -> list[Tensor]:
    """A batch as training sees it.

    :raises ValueError: if inputs or targets are no tensors.
    """
    before, strategy.mbatch = strategy.mbatch, batch
    try:
        strategy._unpack_minibatch()
        task = [strategy.mb_task_id] if isinstance(strategy.model, MultiTaskModule) else []
        used = [strategy.mb_x, strategy.mb_y, *task]
    finally:
        strategy.mbatch = before
    for kind in (type(value) for value in used if not isinstance(value, Tensor)):
        raise ValueError(
            f"passes over a task's data need an input and a target that are tensors, got a "
            f"{kind.__name__}"
        )
    return used


def dataset_features(
    data: Any, strategy: Any, features_of: Callable[..., Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Features of shape (examples, width), and labels, in eval mode.

    :param features_of: of a batch of inputs; by default the inputs of the last layer.
    :raises ValueError: without examples.
    """
    model, found = strategy.model, []

    def penultimate(*batch: Tensor) -> Tensor:
        with penultimate_features(model) as features:
            model(*batch)
        return features[-1]

    with in_mode(model, train=False), torch.no_grad():
        for x, y, *task in dataset_loader(data.eval(), strategy, strategy.eval_mb_size):
            found.append(((features_of or penultimate)(x, *task), y))
    if not found:
        raise ValueError("a domain has no training examples")
    features, labels = (torch.cat(column) for column in zip(*found, strict=True))
    return features, labels
