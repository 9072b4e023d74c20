"""Averages of weights over tasks."""

from __future__ import annotations

import torch
from torch import Tensor

from covon_avalanche.merging.rule import MergeRule, Task
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
            m0 = task.before[name]
            merged[name] = m0 + self._weight(name, m, task) * (m - m0)
        return merged

    def observe(self, task: Task) -> None:
        """Count the task for the rows that it has changed."""
        counted = {}
        for name, p in task.trained().items():
            changed = _by_row(p != task.before[name]).any(1)
            counted[name] = self._counts(name, p) + changed
        self.tasks = {**self.tasks, **counted}

    def _counts(self, name: str, p: Tensor) -> Tensor:
        """Tasks so far, by row; 0 for rows that are new."""
        counts = torch.zeros(len(_by_row(p)), dtype=p.dtype, device=p.device)
        known = self.tasks.get(name, counts[:0])
        counts[: len(known)] = known
        return counts

    def _weight(self, name: str, m: Tensor, task: Task) -> Tensor | float:
        """Weight of the new task, broadcast over the parameter's rows."""
        return _along_rows(1 / (self._counts(name, m) + 1), m)


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

    def _weight(self, name: str, m: Tensor, task: Task) -> Tensor | float:
        if task.has_prior:
            return self.gamma
        counts = self._counts(name, m)
        return _along_rows(torch.where(counts > 0, self.gamma, 1.0).to(m), m)


def _by_row(p: Tensor) -> Tensor:
    """As a matrix with one row for each output; a scalar has one."""
    return p.flatten(1) if p.dim() > 1 else p.reshape(-1, 1)


def _along_rows(values: Tensor, p: Tensor) -> Tensor:
    """Values by row in a shape that broadcasts to the parameter's."""
    return values.view(-1, *[1] * (p.dim() - 1)) if p.dim() else values.view(())
