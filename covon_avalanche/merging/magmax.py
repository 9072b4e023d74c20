"""MagMax: for each weight, the change of largest magnitude."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_choice, check_positive
from covon_avalanche.merging.rule import MergeRule, Task, in_shape
from covon_avalanche.optim.interrupts import defer_interrupt

Start = Literal["pretrained", "last"]


class MagMax(MergeRule):
    """Takes for each weight the change of largest magnitude over the tasks::

        m1 = θ0 + coefficient * d_i,    d_i = m_i - θ0

    ``i`` is the task with the largest ``|d_i|``; ties go to the later task. ``θ0`` are the weights
    at the beginning of the first task, or when a parameter or an output was added. Between tasks
    the model has the merged weights, but training does not continue from them: :meth:`begin_task`,
    called by the plugins, resets the model to the rule's starting weights. With CoVON ``start``
    only sets the initial weights: the prior stays centred at the merged ones.

    Marczak et al., "MagMax: Leveraging Model Merging for Seamless Continual Learning" (ECCV 2024);
    written from the paper. Keeps two copies of the weights, ``θ0`` and the largest changes so far,
    and with ``start="last"`` a third between tasks.
    """

    needs_before = False

    def __init__(self, coefficient: float = 0.5, start: Start = "last") -> None:
        """
        :param coefficient: weight of the largest changes, > 0.
        :param start: train each task from the weights of the ``"last"`` task before its merge, or
            from the ``"pretrained"`` ones.
        """
        check_positive("coefficient", coefficient)
        check_choice("start", start, get_args(Start))
        self.coefficient = coefficient
        self.start: Start = start
        self.pretrained: dict[str, Tensor] = {}
        """``θ0`` by parameter name."""
        self.largest: dict[str, Tensor] = {}
        """The largest changes so far, by parameter name."""
        self.last: dict[str, Tensor] = {}
        """The last task's weights before its merge, kept between tasks with ``start="last"``."""

    @property
    def independent_tasks(self) -> bool:
        """See :class:`MergeRule`."""
        return self.start == "pretrained"

    @torch.no_grad()
    def begin_task(self, model: nn.Module) -> None:
        """Set the weights that training starts from."""
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        grown = {n: in_shape(self.pretrained.get(n), p.detach()) for n, p in trained.items()}
        start = self.last if self.start == "last" else grown
        with defer_interrupt():
            self.pretrained = {**self.pretrained, **grown}
            for name in trained.keys() & start.keys():  # none in an interrupted task that continues
                trained[name].copy_(in_shape(start[name], trained[name].detach()))
            self.last = {}

    def merge(self, task: Task) -> dict[str, Tensor]:
        """See :class:`MergeRule`.

        :raises ValueError: if :meth:`begin_task` was not called.
        """
        trained = task.trained()
        if not trained.keys() <= self.pretrained.keys():
            raise ValueError(
                "MagMax needs the weights before training: call rule.begin_task(model) at the "
                "beginning of each task"
            )
        if self.start == "last":
            self.last = {name: m.clone() for name, m in trained.items()}
        for name, m in trained.items():
            d = m - self.pretrained[name]
            past = in_shape(self.largest.get(name), torch.zeros_like(d))
            task.measured[name] = torch.where(d.abs() >= past.abs(), d, past)
        return {n: self.pretrained[n] + self.coefficient * d for n, d in task.measured.items()}

    def observe(self, task: Task) -> None:
        """Keep the largest changes."""
        self.largest = {**self.largest, **task.measured}
