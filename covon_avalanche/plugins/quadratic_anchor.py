"""Decoupled quadratic regularisation toward an anchor in an Avalanche strategy.

As AdamW decouples weight decay from Adam, Algorithms 2 and 3 decouple the pull
``theta - rate * (theta - anchor)``, with ``rate = lr * precision / ess``, from the gradient
step. Where the rate is 1 or more, that step would jump past the anchor and, from 2 on,
diverge; there the implicit (proximal) step ``(theta + rate * anchor) / (1 + rate)`` is
taken instead, after the gradient step, as a proximal method does.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor

from covon_avalanche.optim.checks import check_positive
from covon_avalanche.plugins.schedule import (
    Schedule,
    apply_shared,
    check_schedule,
    scheduled_values,
)
from covon_avalanche.plugins.task_loader import check_whole_task
from covon_avalanche.posterior.gaussian import DiagGaussian, embed


class QuadraticAnchorPlugin(SupervisedPlugin):
    """Base of :class:`AdaRegPlugin` and :class:`EWCStarPlugin`.

    Keeps one anchor (the weights after the last task) and one accumulated precision. Each
    optimizer step also pulls the weights toward the anchor by ``lr * precision / ess``, decoupled
    from the loss like AdamW's weight decay. Memory is constant in the number of tasks.
    """

    scheduled: ClassVar[frozenset[str]] = frozenset({"lr", "ess", "epochs"})

    def __init__(
        self,
        *,
        strength: float = 1.0,
        ess: float | None = None,
        weight_decay: float = 0.0,
        schedule: Schedule | None = None,
    ) -> None:
        """
        :param strength: multiplies each task's importance, and so sets the regularisation:
            ``ess`` nearly cancels between accumulating the precision and using it.
        :param ess: effective sample size of a task, in examples; by default the size of
            the task's data.
        :param weight_decay: precision per example of the first prior N(0, 1/s0), that is
            ``s0 = ess * weight_decay``, to which later tasks add. It replaces the optimizer's own
            weight decay: set that to 0 (AdamW's default is 0.01).
        :param schedule: ``lr``, ``ess`` and ``epochs`` by experience: a list of dicts, in the
            order of training.
        """
        super().__init__()
        check_positive("strength", strength, zero=True)
        check_positive("weight_decay", weight_decay, zero=True)
        if ess is not None:
            check_positive("ess", ess)
        check_schedule(schedule, self.scheduled)
        self.strength = strength
        self.ess = ess
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.anchor = DiagGaussian({}, {})
        """The weights after the last task, and the precision of the pull toward them."""
        self._ess_now = 1.0
        self._largest: dict[str, float] = {}  # largest precision by name: often no implicit pull

    @abstractmethod
    def _importance(self, strategy: Any) -> dict[str, Tensor]:
        """Curvature per example of the task just trained, by parameter name."""

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Apply the schedule, set this task's ``ess``, and extend the anchor if the model grew."""
        check_whole_task(strategy.experience)
        values = scheduled_values(self.schedule, strategy)
        if "ess" in values:
            check_positive("ess", values["ess"])
        apply_shared(strategy, values)
        self.ess = values.get("ess", self.ess)
        size = len(strategy.experience.dataset)
        self._ess_now = float(size if self.ess is None else self.ess)
        self.anchor = self._grown_anchor(strategy.model)
        self._largest = {name: s.max().item() for name, s in self.anchor.precision.items()}

    def _grown_anchor(self, model: torch.nn.Module) -> DiagGaussian:
        """The anchor in the model's shapes; new entries have the first prior."""
        means, precisions = {}, {}
        for name, p in model.named_parameters():
            means[name] = torch.zeros_like(p, requires_grad=False)
            precisions[name] = torch.full_like(means[name], self._ess_now * self.weight_decay)
            if name in self.anchor.mean:
                means[name] = embed(self.anchor.mean[name].to(p), means[name])
                precisions[name] = embed(self.anchor.precision[name].to(p), precisions[name])
        return DiagGaussian(means, precisions)

    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """The explicit pull, before the optimizer step."""
        self._pull(strategy, implicit=False)

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """The implicit pull, after the optimizer step."""
        self._pull(strategy, implicit=True)

    @torch.no_grad()
    def _pull(self, strategy: Any, implicit: bool) -> None:
        lr = {p: group["lr"] for group in strategy.optimizer.param_groups for p in group["params"]}
        pull = implicit_pull if implicit else explicit_pull
        for name, p in strategy.model.named_parameters():
            if p not in lr or not p.requires_grad or p.grad is None:
                continue
            scale = lr[p] / self._ess_now
            largest = scale * self._largest[name]
            if largest > 0 and (largest >= 1 or not implicit):
                rate = scale * self.anchor.precision[name]
                p.copy_(pull(p, self.anchor.mean[name], rate))

    @torch.no_grad()
    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Take the weights as the anchor, and add the task's importance to the precision."""
        importance = self._importance(strategy)
        means, precisions = {}, dict(self._grown_anchor(strategy.model).precision)
        for name, p in strategy.model.named_parameters():
            if name in importance:
                added = self.strength * self._ess_now * importance[name]
                precisions[name] = precisions[name] + added
            if not torch.isfinite(precisions[name]).all():
                raise FloatingPointError(
                    f"the importance of {name!r} is not finite: training has diverged"
                )
            means[name] = p.detach().clone()
        self.anchor = DiagGaussian(means, precisions)


def explicit_pull(parameter: Tensor, anchor: Tensor, rate: Tensor) -> Tensor:
    """The pull of the entries with ``rate < 1``, to be made before the gradient step."""
    stable = torch.where(rate < 1, rate, torch.zeros_like(rate))
    return parameter - stable * (parameter - anchor)


def implicit_pull(parameter: Tensor, anchor: Tensor, rate: Tensor) -> Tensor:
    """The pull of the entries with ``rate >= 1``, to be made after the gradient step."""
    return torch.where(rate < 1, parameter, (parameter + rate * anchor) / (1 + rate))
