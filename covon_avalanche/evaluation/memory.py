"""Memory that a method needs between steps, relative to the model's parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.storage_policy import BalancedExemplarsBuffer, ExemplarsBuffer
from avalanche.training.templates.base import BaseTemplate
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

TRANSIENT = frozenset(
    ("experience", "dataloader", "adapted_dataset", "mbatch", "mb_output", "loss")
    + ("current_eval_stream", "_eval_streams", "checkpointer", "parallel_model", "shares")
)
"""Attributes of a strategy that are set again before they are used."""
_NO_MEMORY = frozenset(("model", "plugins", "evaluator", "_experiences"))  # counted below, or data
_Item: TypeAlias = Tensor | AvalancheDataset[Any]


class MemoryFootprint(SupervisedPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Measures what a strategy stores between two optimizer steps.

    ``ratios`` are this memory divided by that of the parameters, after the second step of each
    experience, and ``ratio`` is the largest: parameters, optimizer state (samples included),
    tensors of strategy and plugins (anchors, importances, old models) and stored examples. An
    example counts as the network receives it, with its labels, even if the memory only refers to
    the data set. Gradients and the running statistics of batch norm, which every method has, do not
    count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ratios: list[float] = []
        self._measured = False
        self._steps = 0  # of the experience

    @property
    def ratio(self) -> float:
        """The largest of the ratios."""
        return max(self.ratios, default=0.0)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """A new experience begins."""
        self._measured, self._steps = False, 0

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Count the steps."""
        self._steps += 1

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        """Measure once, because it takes time; right after a step, so that a run that resumes from
        a checkpoint measures what an undisturbed one does."""
        if not self._measured and self._steps >= 2:
            self._measure(strategy)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Measure a method without gradient steps, or with a single one."""
        if not self._measured:
            self._measure(strategy)

    def _measure(self, strategy: Any) -> None:
        self._measured = True
        parameters = list(strategy.model.parameters())
        plugins = [p for p in strategy.plugins if not isinstance(p, EvaluationPlugin)]
        trained = getattr(strategy, "adapted_dataset", None)  # of Cumulative it is all data
        own = [
            value
            for name, value in vars(strategy).items()
            if name not in TRANSIENT | _NO_MEMORY
            and not name.startswith("mb_")  # of the present batch, with replayed examples
            and value is not trained
        ]
        owners = [vars(owner) for owner in (strategy.optimizer, *plugins)]
        modules = [m for m in strategy.model.modules() if not isinstance(m, _BatchNorm)]
        buffers = [b for m in modules for b in m.buffers(recurse=False) if b.dim() > 0]
        sizes = _sizes([*parameters, *buffers, *_stored([*owners, *own], depth=10)])
        gradients = _sizes(p.grad for p in parameters if p.grad is not None)
        total = sum(size for address, size in sizes.items() if address not in gradients)
        self.ratios.append(total / sum(_sizes(parameters).values()))


def _sizes(stored: Iterable[_Item]) -> dict[int, int]:
    """Bytes of tensors and data sets by address, each counted once."""
    sizes = {}
    for item in stored:
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif len(item) > 0:  # eval, because augmentation would draw random numbers
            parts = (torch.as_tensor(part, device="cpu") for part in item.eval()[0])
            sizes[id(item)] = len(item) * sum(part.nbytes for part in parts)
    return sizes


def _stored(value: Any, depth: int) -> Iterator[_Item]:
    """All dense tensors except scalars, and all data sets, in nested containers and objects."""
    if isinstance(value, Tensor):
        if value.dim() > 0 and value.layout is torch.strided:
            yield value
    elif isinstance(value, AvalancheDataset):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif depth > 0 and not isinstance(value, BaseTemplate):  # a plugin may keep its strategy
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
            yield from _stored(child, depth - 1)
