"""How much a method keeps in memory, in units of the model's parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.storage_policy import BalancedExemplarsBuffer, ExemplarsBuffer
from torch import Tensor


class KeptTensors(SupervisedPlugin):
    """Measures what a strategy keeps between two optimizer steps.

    ``parameters_worth`` is the largest total seen at the end of a domain's first epoch (later
    ones keep the same, and counting takes time) of weights (without the model's buffers),
    optimizer state and its second copy of the weights, the plugins' tensors (anchors,
    importances, old models), and stored examples, divided by the size of the weights. An
    example counts as the network gets it, with its labels, even where the memory only points
    to the data set. Gradients, which every method has, and transients do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters_worth = 0.0
        self._counted = False

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Another domain."""
        self._counted = False

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        """Count."""
        if self._counted:
            return
        self._counted = True
        weights = list(strategy.model.parameters())
        plugins = [p for p in strategy.plugins if not isinstance(p, EvaluationPlugin)]
        memory = getattr(strategy, "storage_policy", None)
        owners = [vars(owner) for owner in (strategy.optimizer, *plugins)]
        kept = [*weights, *_kept([*owners, memory], depth=10)]
        gradients = [p.grad for p in weights if p.grad is not None]
        total = _bytes(kept, but_not=gradients)
        self.parameters_worth = max(self.parameters_worth, total / _bytes(weights))


def _bytes(kept: Iterable[Tensor | AvalancheDataset[Any]], but_not: Sequence[Tensor] = ()) -> int:
    """Of tensors and data sets, each once."""
    storages: dict[int, int] = {}
    examples: dict[int, int] = {}
    for one in kept:
        if isinstance(one, Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        else:
            examples[id(one)] = _bytes_of_examples(one)
    for tensor in but_not:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values()) + sum(examples.values())


def _bytes_of_examples(dataset: AvalancheDataset[Any]) -> int:
    if len(dataset) == 0:
        return 0
    example = dataset.eval()[0]  # augmentation would draw random numbers
    return len(dataset) * sum(torch.as_tensor(part).nbytes for part in example)


def _kept(value: Any, depth: int) -> Iterator[Tensor | AvalancheDataset[Any]]:
    """All dense tensors of at least one dimension, and data sets, in containers and objects, a
    few levels down."""
    if isinstance(value, Tensor):
        if value.dim() > 0 and value.layout is torch.strided:
            yield value
    elif isinstance(value, AvalancheDataset):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif depth > 0:
        if isinstance(value, Mapping):
            children = list(value.values())
        elif isinstance(value, BalancedExemplarsBuffer):
            children = value.buffer_datasets
        elif isinstance(value, ExemplarsBuffer):
            children = [value.buffer]
        elif isinstance(value, list | tuple | set | deque):
            children = list(value)
        else:
            children = list(getattr(value, "__dict__", {}).values())
        for child in children:
            yield from _kept(child, depth - 1)
