"""Decoupled quadratic regularisation toward an anchor in an Avalanche strategy."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor

from covon_avalanche.optim.checks import check_positive
from covon_avalanche.optim.decoupled import explicit_pull, implicit_pull
from covon_avalanche.plugins.boundaries import (
    TaskBoundaries,
    require_boundaries,
    task_data,
    task_index,
)
from covon_avalanche.plugins.schedule import Schedule, apply_shared, check_schedule, values_for
from covon_avalanche.posterior.gaussian import DiagGaussian, embed


class QuadraticAnchorPlugin(SupervisedPlugin):
    """Base of :class:`AdaRegPlugin` and :class:`EWCStarPlugin`.

    Keeps one anchor (the weights after the last task) and one accumulated precision. Each
    optimizer step also pulls the weights toward the anchor by ``lr * precision / ess``, decoupled
    from the loss like AdamW's weight decay (see ``optim.decoupled`` for the implicit form, used
    where that factor reaches 1). Memory is constant in the number of tasks.
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
        :param schedule: per-experience ``lr``, ``ess`` and ``epochs``.
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
        self.anchor: DiagGaussian | None = None
        self._boundaries = TaskBoundaries()
        self._ess_now = 1.0
        self._largest: dict[str, float] = {}  # largest precision by name: often no implicit pull

    @abstractmethod
    def _importance(self, strategy: Any) -> dict[str, Tensor]:
        """Curvature per example of the task just trained, by parameter name."""

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Apply the schedule, set this task's ``ess``, and extend the anchor if the model grew."""
        require_boundaries(strategy.experience)
        if self._boundaries.begins(strategy.experience):
            self._start_task(strategy)

    def _start_task(self, strategy: Any) -> None:
        values = values_for(self.schedule, task_index(strategy), self.scheduled)
        if "ess" in values:
            check_positive("ess", values["ess"])
        apply_shared(strategy, values)
        self.ess = values.get("ess", self.ess)
        size = len(task_data(strategy.experience))
        self._ess_now = float(size if self.ess is None else self.ess)
        self.anchor = self._grown_anchor(strategy.model)

    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """The explicit pull, before the optimizer step."""
        self._pull(strategy, implicit=False)

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """The implicit pull, after the optimizer step."""
        self._pull(strategy, implicit=True)

    @torch.no_grad()
    def _pull(self, strategy: Any, implicit: bool) -> None:
        if self.anchor is None:
            return
        groups = strategy.optimizer.param_groups
        fastest = max(group["lr"] for group in groups) / self._ess_now
        if implicit and fastest * max(self._largest.values(), default=0.0) < 1:
            return
        lr = {p: group["lr"] for group in groups for p in group["params"]}
        for name, p in strategy.model.named_parameters():
            known = p in lr and name in self.anchor.mean
            if not known or not p.requires_grad or p.grad is None:
                continue
            scale = lr[p] / self._ess_now
            if implicit and not scale * self._largest[name] >= 1:
                continue
            pull = implicit_pull if implicit else explicit_pull
            rate = scale * self.anchor.precision[name]
            p.copy_(pull(p, self.anchor.mean[name], rate))

    @torch.no_grad()
    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Take the weights as the anchor, and add the task's importance to the precision."""
        if not self._boundaries.ends(strategy.experience):
            return
        importance = self._importance(strategy)
        means, precisions = {}, {}
        for name, p in strategy.model.named_parameters():
            precision = torch.zeros_like(p)
            if self.anchor is not None and name in self.anchor.precision:
                precision = self.anchor.precision[name]
            if name in importance:
                precision = precision + self.strength * self._ess_now * importance[name]
            if not torch.isfinite(precision).all():
                raise FloatingPointError(
                    f"the importance of {name!r} is not finite: training has diverged"
                )
            means[name], precisions[name] = p.detach().clone(), precision
        self.anchor = DiagGaussian(means, precisions)

    def _grown_anchor(self, model: torch.nn.Module) -> DiagGaussian | None:
        """The anchor in the model's shapes; new entries start with the first prior."""
        if self.anchor is None and self.weight_decay == 0:
            return None
        means, precisions = {}, {}
        for name, p in model.named_parameters():
            means[name] = torch.zeros_like(p, requires_grad=False)
            precisions[name] = torch.full_like(means[name], self._ess_now * self.weight_decay)
            if self.anchor is not None and name in self.anchor.mean:
                means[name] = embed(self.anchor.mean[name].to(p), means[name])
                precisions[name] = embed(self.anchor.precision[name].to(p), precisions[name])
        self._largest = {name: s.max().item() for name, s in precisions.items()}
        return DiagGaussian(means, precisions)
