"""Averaging weighted by the diagonal Fisher information: Fisher merging and CoFiMA."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from covon_avalanche.checks import check_fraction, check_logits
from covon_avalanche.float64 import in_double
from covon_avalanche.merging.rule import MergeRule, Task, in_shape
from covon_avalanche.posterior.fisher import expected_squared_gradients, in_mode, zero_sums

_FLOOR = 1e-6  # of Fisher merging
_MOST_FISHER = 1e-4  # CoFiMA's


class FisherMerge(MergeRule):
    """Fisher-weighted averaging, kept as a running average over the tasks::

        m1 = (F0 m0 + F m) / (F0 + F),    F0 ← F0 + F

    ``F`` is the task's diagonal Fisher information at its final weights before the merge, with
    labels from the model's own predictions
    (:func:`~covon_avalanche.posterior.fisher.expected_squared_gradients`), at least 1e-6 and
    divided by the norm over all weights, so that every task has the same weight. Takes as many
    passes with gradients over each task's data as there are classes, at most 10. Weights that are
    new, such as those of new classes, keep their new values. Matena and Raffel, "Merging Models
    with Fisher-Weighted Averaging" (NeurIPS 2022); written from the paper and the formulas of the
    authors' code (github.com/mmatena/model_merging). The authors merge several models at once, and
    their floor applies to one of them only by default; here it applies to every task.
    """

    needs_data = True

    def __init__(self) -> None:
        self.fisher: dict[str, Tensor] = {}
        """``F0`` by parameter name."""

    def merge(self, task: Task) -> dict[str, Tensor]:
        task.measured = self._measure(task)
        merged = {}
        for name, m in task.trained().items():
            f, m0 = task.measured[name], task.before[name]
            merged[name] = m0 + self._weight(self._past(name, f), f) * (m - m0)
        return merged

    def observe(self, task: Task) -> None:
        """Add the task's Fisher information, without another pass."""
        added = {name: self._past(name, f) + f for name, f in task.measured.items()}
        self.fisher = {**self.fisher, **added}

    def _past(self, name: str, new: Tensor) -> Tensor:
        """``F0``, 0 for new weights."""
        return in_shape(self.fisher.get(name), torch.zeros_like(new))

    def _measure(self, task: Task) -> dict[str, Tensor]:
        """``F`` by parameter name."""
        fisher = expected_squared_gradients(task.model, task.batches())
        squares = sum(float(in_double(f).square().sum()) for f in fisher.values())
        norm = max(math.sqrt(squares), _FLOOR)
        return {name: f.clamp(min=_FLOOR) / norm for name, f in fisher.items()}

    def _weight(self, past: Tensor, new: Tensor) -> Tensor:
        """Weight of the new task, from ``F0`` and ``F``."""
        return new / (past + new)


class CoFiMA(FisherMerge):
    """Averaging of the last two models, weighted by their diagonal Fisher information::

        m1 = ((1 - γ) F0 m0 + γ F m) / ((1 - γ) F0 + γ F),    F0 ← F

    ``F`` is the mean over mini-batches of the squared gradients of their mean cross-entropy, in
    loss²/weight², at most 1e-4, at the task's final weights before the merge, in training mode and,
    with :class:`covon_avalanche.plugins.MergePlugin`, on training's own mini-batches; ``F0`` is
    that of the previous task, so only one copy of the size of the weights is kept. The first task
    is kept as it is, as are new rows of a growing classifier. With equal Fishers this is
    :class:`EMA`, which the authors call CoMA. Marouf et al., "Weighted Ensemble Models Are Strong
    Continual Learners" (ECCV 2024), which also aligns the classifier: see
    :class:`~covon_avalanche.plugins.SLCAPlugin`. In a loop of your own, pass ``batch_norm_batches``
    to :func:`merge_into`: the pass in training mode changes batch norm's running statistics.
    Weights whose Fisher information is zero in both tasks keep their new values; the authors' code
    divides 0 by 0.
    """

    augmented = True

    def __init__(self, gamma: float = 0.4) -> None:
        """:param gamma: weight of the new task, in (0, 1]."""
        super().__init__()
        check_fraction("gamma", gamma)
        self.gamma = gamma

    def observe(self, task: Task) -> None:
        """Keep the task's Fisher information instead of the one before, without another pass."""
        self.fisher = task.measured

    def _measure(self, task: Task) -> dict[str, Tensor]:
        parameters = {n: p for n, p in task.model.named_parameters() if p.requires_grad}
        sums = zero_sums(task.model)
        batches = 0
        with in_mode(task.model, train=True):
            for x, y, *more in task.batches():
                output = task.model(x, *more)
                check_logits("CoFiMA", output, y)
                loss = F.cross_entropy(output, y)
                gradients = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
                for total, gradient in zip(sums.values(), gradients, strict=True):
                    if gradient is not None:
                        total += gradient.square()
                batches += 1
        means = {name: (total / batches).clamp(max=_MOST_FISHER) for name, total in sums.items()}
        return {name: mean.to(parameters[name].dtype) for name, mean in means.items()}

    def _weight(self, past: Tensor, new: Tensor) -> Tensor:
        weight = self.gamma * new / ((1 - self.gamma) * past + self.gamma * new)
        return torch.where(weight.isnan() & new.isfinite(), 1.0, weight)  # 0 / 0
