"""A quadratic penalty on changes of important weights, the base of EWC, SI, MAS and RWalk."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor

from covon_avalanche.optim.quadratic_anchor import check_finite, grown
from covon_avalanche.plugins.task_loader import check_whole_task
from covon_avalanche.posterior.gaussian import DiagGaussian


class QuadraticPenaltyPlugin(SupervisedPlugin):
    """Base of :class:`EWCPlugin`, :class:`SIPlugin`, :class:`MASPlugin` and :class:`RWalkPlugin`.

    The loss has the penalty ``factor * sum(importance * (theta - anchor)²)`` added. Its gradient is
    added to those of the loss just before the optimizer's step, so that subclasses find the
    gradient of the loss alone in ``before_update``, without another backward pass;
    ``strategy.loss`` is without the penalty. (:class:`QuadraticAnchorPlugin` pulls the weights
    themselves, past the optimizer.) Give the plugin to the strategy *after* a
    :class:`PosteriorPlugin` or :class:`MergePlugin`. Memory is constant in the number of tasks.
    """

    reads_merged_weights = True

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.anchor = DiagGaussian({}, {})
        """The centre of the penalty, and the importance as its precision."""

    @abstractmethod
    def _consolidated(self, strategy: Any) -> DiagGaussian:
        """The anchor after the task just trained."""

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Extend the anchor if the model grew; new weights have importance 0."""
        check_whole_task(strategy.experience)
        self.anchor = grown(self.anchor, strategy.model.named_parameters())

    @torch.no_grad()
    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """Add the penalty's gradient."""
        named = [(n, p) for n, p in strategy.model.named_parameters() if p.grad is not None]
        if not named or self.factor == 0:
            return
        moved = torch._foreach_sub([p for _, p in named], [self.anchor.mean[n] for n, _ in named])
        importance = [self.anchor.precision[n] for n, _ in named]
        gradients = [p.grad for _, p in named]
        torch._foreach_addcmul_(gradients, moved, importance, value=2 * self.factor)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Update the anchor."""
        self.anchor = self._consolidated(strategy)
        check_finite(self.anchor)


class PathPlugin(QuadraticPenaltyPlugin):
    """Base of :class:`SIPlugin` and :class:`RWalkPlugin`: how much each weight contributes to the
    decrease of the loss, ``-sum of g * (change in the step)``."""

    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self._step: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        """Parameters, their gradients and their values before a step."""
        self._start: dict[str, Tensor] = {}  # weights where the path begins
        self._path: dict[str, Tensor] = {}

    def _begin_path(self, strategy: Any) -> None:
        self._start = {n: p.detach().clone() for n, p in strategy.model.named_parameters()}
        self._path = {  # at least float32: long sums in bfloat16 stop growing
            n: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for n, p in self._start.items()
        }

    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """Copy the gradient of the loss and the weights, then add the penalty's gradient."""
        self._step = {
            name: (p, p.grad.clone(), p.detach().clone())
            for name, p in strategy.model.named_parameters()
            if p.grad is not None
        }
        super().before_update(strategy, **kwargs)

    @torch.no_grad()
    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Follow the step."""
        for name, (p, gradient, before) in self._step.items():
            self._path[name].addcmul_(gradient, p - before, value=-1)
        self._step = {}
