"""Averages of weights over tasks."""

from __future__ import annotations

import torch
from torch import Tensor

from covon_avalanche.merging.rule import MergeRule, Task, in_shape
from covon_avalanche.posterior.gaussian import check_gamma


class Average(MergeRule):
    """Running mean of the weights over the tasks: ``m1 = m0 + (m - m0) / t``.

    ``t`` counts the tasks that have trained a row (an output of a layer), this one included, so
    that a new row of a growing classifier, or a head that only some tasks use, has the mean
    over its own tasks. Averaging fine-tuned weights: Wortsman et al., "Model Soups" (ICML 2022).
    """

    def __init__(self) -> None:
        self.tasks: dict[str, Tensor] = {}
        """How many tasks have trained each row of a parameter, of shape (rows,)."""

    def merge(self, task: Task) -> dict[str, Tensor]:
        merged = {}
        for name, m in task.trained().items():
            m0, weight = task.before[name], self._weight(self._counts(name, m), task)
            merged[name] = m0 + weight.view([*m.shape[:1], *[1] * (m.dim() - 1)]) * (m - m0)
        return merged

    def observe(self, task: Task) -> None:
        """Count the task for the rows that it has changed."""
        counted = {}
        for name, p in task.trained().items():
            changed = p != task.before[name]
            rows = changed.flatten(1).any(1) if p.dim() > 1 else changed.flatten()
            counted[name] = self._counts(name, p) + rows
        self.tasks = {**self.tasks, **counted}

    def _counts(self, name: str, p: Tensor) -> Tensor:
        """Tasks so far, by row; 0 for rows that are new. A scalar is one row."""
        none = torch.zeros(p.shape[:1].numel(), dtype=p.dtype, device=p.device)
        return in_shape(self.tasks.get(name), none)

    def _weight(self, counts: Tensor, task: Task) -> Tensor:
        """Weight of the new task, by row."""
        return 1 / (counts + 1)


class EMA(Average):
    """Exponential moving average of the weights: ``m1 = m0 + γ (m - m0)``.

    Rows that no earlier task has trained keep their new weights. With CoVON ``m0`` is the mean of
    the prior, and the first prior is merged, too, as in Eq. 8: this is the paper's ablation of
    Eq. 8 without curvature. Without a posterior optimizer the first task is kept as it is, and this
    is CoMA, whose authors take ``γ = 0.4``: Marouf et al., "Weighted Ensemble Models Are Strong
    Continual Learners" (ECCV 2024).
    """

    def __init__(self, gamma: float) -> None:
        """
        :param gamma: weight of the new task, in (0, 1]; above 1 with a warning.
        """
        super().__init__()
        check_gamma(gamma)
        self.gamma = gamma

    def _weight(self, counts: Tensor, task: Task) -> Tensor:
        return torch.where((counts > 0) | task.has_prior, counts.new_tensor(self.gamma), 1.0)
