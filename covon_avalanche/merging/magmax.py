"""MagMax: for each weight, the change of largest magnitude."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_positive
from covon_avalanche.merging.rule import MergeRule, Task, in_shape
from covon_avalanche.optim.interrupts import defer_interrupt


class MagMax(MergeRule):
    """Takes for each weight the change of largest magnitude over the tasks::

        m1 = θ0 + coefficient * d_i,    d_i = m_i - θ0

    ``i`` is the task with the largest ``|d_i|``; ties go to the later task. ``θ0`` are the weights
    at the beginning of the first task, or when a parameter or an output was added. Between tasks
    the model has the merged weights, but training continues from those of before the merge, which
    :meth:`begin_task`, called by the plugins, restores. With CoVON the prior stays centred at the
    merged weights.

    Marczak et al., "MagMax: Leveraging Model Merging for Seamless Continual Learning" (ECCV 2024);
    written from the paper. Keeps two copies of the weights, ``θ0`` and the largest changes so far,
    and a third between tasks.
    """

    needs_before = False

    def __init__(self, coefficient: float = 0.5) -> None:
        """:param coefficient: weight of the largest changes, > 0."""
        check_positive("coefficient", coefficient)
        self.coefficient = coefficient
        self.pretrained: dict[str, Tensor] = {}
        """``θ0`` by parameter name."""
        self.largest: dict[str, Tensor] = {}
        """The largest changes so far, by parameter name."""
        self.last: dict[str, Tensor] = {}
        """The last task's weights before its merge, kept between tasks."""

    @torch.no_grad()
    def begin_task(self, model: nn.Module) -> None:
        """Restore the last task's weights before its merge."""
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        grown = {n: in_shape(self.pretrained.get(n), p.detach()) for n, p in trained.items()}
        with defer_interrupt():
            self.pretrained = {**self.pretrained, **grown}
            for name in trained.keys() & self.last.keys():  # none if a task continues
                trained[name].copy_(in_shape(self.last[name], trained[name].detach()))
            self.last = {}

    def merge(self, task: Task) -> dict[str, Tensor]:
        """See :class:`MergeRule`.

        :raises ValueError: if :meth:`begin_task` was not called.
        """
        trained = task.trained()
        known = {name: past.shape for name, past in self.pretrained.items()}
        if missing := [name for name, m in trained.items() if known.get(name) != m.shape]:
            raise ValueError(
                f"MagMax needs the weights of {missing[0]!r} before training: call "
                "rule.begin_task(model) at the beginning of each task, with shapes and "
                "requires_grad as in training"
            )
        self.last = {name: m.clone() for name, m in trained.items()}
        for name, m in trained.items():
            d = m - self.pretrained[name]
            past = in_shape(self.largest.get(name), torch.zeros_like(d))
            task.measured[name] = torch.where(d.abs() >= past.abs(), d, past)
        return {n: self.pretrained[n] + self.coefficient * d for n, d in task.measured.items()}

    def observe(self, task: Task) -> None:
        """Keep the largest changes."""
        self.largest = {**self.largest, **task.measured}
