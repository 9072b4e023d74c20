"""Averaging weighted by the diagonal Fisher information."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from covon_avalanche.merging.rule import MergeRule, Task
from covon_avalanche.posterior.fisher import Criterion, squared_example_gradients
from covon_avalanche.posterior.gaussian import embed


class FisherMerge(MergeRule):
    """Fisher-weighted averaging, kept as a running average over the tasks::

        m1 = (F0 m0 + F m) / (F0 + F),    F0 ← F0 + F

    with the exact empirical Fisher information ``F`` of each task at the weights that the task has
    left, in loss²/weight² per example, so that every task counts alike whatever its size. Weights
    whose Fisher information has been zero in all tasks, such as those of classes that are new,
    keep their new values. Matena and Raffel, "Merging Models with Fisher-Weighted Averaging"
    (NeurIPS 2022); written from the paper.
    """

    needs_data = True

    def __init__(self, criterion: Criterion = F.cross_entropy) -> None:
        """
        :param criterion: the training loss, averaged over the batch.
        """
        self.criterion = criterion
        self.fisher: dict[str, Tensor] = {}
        """``F0`` by parameter name: the sum over the tasks so far."""
        self._task_fisher: dict[str, Tensor] = {}  # F, from merge to observe

    def merge(self, task: Task) -> dict[str, Tensor]:
        """See :class:`MergeRule`; one pass over the data, with gradients."""
        self._task_fisher = squared_example_gradients(task.model, task.batches(), self.criterion)
        merged = {}
        for name, m in task.trained().items():
            fisher, m0 = self._task_fisher[name], task.before[name]
            weight = fisher / (self._past(name, fisher) + fisher)
            weight = torch.where(weight.isnan() & fisher.isfinite(), 1.0, weight)  # 0 / 0
            merged[name] = m0 + weight * (m - m0)
        return merged

    def observe(self, task: Task) -> None:
        """Add the task's Fisher information, without another pass."""
        added = {name: self._past(name, f) + f for name, f in self._task_fisher.items()}
        self.fisher = {**self.fisher, **added}
        self._task_fisher = {}

    def _past(self, name: str, fisher: Tensor) -> Tensor:
        """``F0`` in the parameter's present shape."""
        nothing = torch.zeros_like(fisher)
        return embed(self.fisher[name], nothing) if name in self.fisher else nothing
