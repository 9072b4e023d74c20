"""How much a method keeps in memory, in units of the model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from torch import Tensor


class KeptTensors(SupervisedPlugin):
    """Measures the tensors a strategy keeps between two optimizer steps.

    ``parameters_worth`` is the largest total seen at the end of an epoch of weights,
    optimizer state and buffers, and the plugins' tensors (anchors, importances, old models),
    divided by the size of the weights. Gradients, which every method has, and transients do
    not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters_worth = 0.0

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        """Count."""
        weights = _bytes(strategy.model.parameters())
        plugins = [p for p in strategy.plugins if not isinstance(p, EvaluationPlugin)]
        kept = [*strategy.model.parameters(), *_tensors(vars(strategy.optimizer))]
        kept += [tensor for plugin in plugins for tensor in _tensors(vars(plugin))]
        gradients = [p.grad for p in strategy.model.parameters() if p.grad is not None]
        total = _bytes(iter(kept), but_not=gradients)
        self.parameters_worth = max(self.parameters_worth, total / weights)


def _bytes(tensors: Iterator[Tensor], but_not: Sequence[Tensor] = ()) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for tensor in but_not:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def _tensors(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """All tensors of at least one dimension in containers and objects, a few levels down."""
    if isinstance(value, Tensor):
        if value.dim() > 0:
            yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif depth > 0:
        if isinstance(value, Mapping):
            children = list(value.values())
        elif isinstance(value, list | tuple | set):
            children = list(value)
        else:
            children = list(getattr(value, "__dict__", {}).values())
        for child in children:
            yield from _tensors(child, depth - 1)
