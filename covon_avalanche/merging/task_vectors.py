"""Merging task vectors, the changes of the pretrained weights: task arithmetic, MagMax, TIES."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_choice, check_positive
from covon_avalanche.merging.rule import MergeRule, Task, in_shape
from covon_avalanche.optim.interrupts import defer_interrupt

Start = Literal["pretrained", "last"]
_TIES_DENSITY = 0.2


class TaskVectorRule(MergeRule):
    """Base of rules that merge task vectors ``d = m - θ0``::

        m1 = θ0 + coefficient * combined(d of all tasks)

    ``θ0`` are the weights at the beginning of the first task, or when a parameter or an output was
    added. Between tasks the model has the merged weights. Training does not continue from them:
    :meth:`begin_task`, called by the plugins, resets the model to the rule's starting weights.

    With CoVON ``start`` only sets the initial weights: the prior stays centred at the merged ones.
    """

    needs_before = False

    def __init__(self, coefficient: float, start: Start) -> None:
        check_positive("coefficient", coefficient)
        check_choice("start", start, get_args(Start))
        self.coefficient = coefficient
        self.start: Start = start
        self.pretrained: dict[str, Tensor] = {}
        """``θ0`` by parameter name."""
        self.combined: dict[str, Tensor] = {}
        """The task vectors so far as one, by parameter name."""
        self.last: dict[str, Tensor] = {}
        """Between tasks: the last task's weights before its merge; with ``start="last"``."""

    @torch.no_grad()
    def begin_task(self, model: nn.Module) -> None:
        """Set the weights that training starts from."""
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        grown = {n: in_shape(self.pretrained.get(n), p.detach()) for n, p in trained.items()}
        start = self.last if self.start == "last" else grown
        with defer_interrupt():
            self.pretrained = {**self.pretrained, **grown}
            for name, p in trained.items():
                p.copy_(in_shape(start.get(name), p.detach()))
            self.last = {}

    def merge(self, task: Task) -> dict[str, Tensor]:
        """See :class:`MergeRule`.

        :raises ValueError: if :meth:`begin_task` was not called.
        """
        trained = task.trained()
        if not trained.keys() <= self.pretrained.keys():
            raise ValueError(
                f"{type(self).__name__} needs the weights before training: call "
                "rule.begin_task(model) at the beginning of each task"
            )
        task.measured = self._trimmed({n: m - self.pretrained[n] for n, m in trained.items()})
        if self.start == "last":
            self.last = {name: m.clone() for name, m in trained.items()}
        return {
            name: self.pretrained[name] + self.coefficient * self._combine(name, d)
            for name, d in task.measured.items()
        }

    def observe(self, task: Task) -> None:
        """Add the task's vectors to those of the earlier tasks."""
        added = {name: self._combine(name, d) for name, d in task.measured.items()}
        self.combined = {**self.combined, **added}

    def _trimmed(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is used of a task's vectors."""
        return vectors

    def _past(self, name: str, d: Tensor) -> Tensor:
        """The earlier tasks' vectors as one, in the shape of the new one."""
        return in_shape(self.combined.get(name), torch.zeros_like(d))

    @abstractmethod
    def _combine(self, name: str, d: Tensor) -> Tensor:
        """The vectors of the earlier tasks and a new one as one."""


class TaskArithmetic(TaskVectorRule):
    """Adds the task vectors: ``m1 = θ0 + coefficient * sum d``.

    Ilharco et al., "Editing Models with Task Arithmetic" (ICLR 2023). Keeps two copies of the
    weights, ``θ0`` and the sum; with ``start="last"`` a third between tasks.
    """

    def __init__(self, coefficient: float = 0.3, start: Start = "pretrained") -> None:
        """
        :param coefficient: weight of the sum, > 0.
        :param start: train each task from the ``"pretrained"`` weights, independently of the
            others, or from those of the ``"last"`` task before its merge.
        """
        super().__init__(coefficient, start)

    def _combine(self, name: str, d: Tensor) -> Tensor:
        return self._past(name, d) + d


class MagMax(TaskVectorRule):
    """Takes for each weight the change of largest magnitude: ``m1 = θ0 + coefficient * d_i``, where
    ``i`` is the task with the largest ``|d_i|``; ties go to the later task.

    Marczak et al., "MagMax: Leveraging Model Merging for Seamless Continual Learning" (ECCV 2024);
    written from the paper. Training continues from the last task's unmerged weights. Keeps two
    copies of the weights, ``θ0`` and the largest changes so far, and a third between tasks.
    """

    def __init__(self, coefficient: float = 0.5, start: Start = "last") -> None:
        """
        :param coefficient: weight of the largest changes, > 0.
        :param start: train each task from the weights of the ``"last"`` task before its merge, or
            from the ``"pretrained"`` ones.
        """
        super().__init__(coefficient, start)

    def _combine(self, name: str, d: Tensor) -> Tensor:
        largest = self._past(name, d)
        return torch.where(d.abs() >= largest.abs(), d, largest)


class TIES(TaskVectorRule):
    """Trims the task vectors, elects a sign for each weight and averages the entries that agree.

    The 20 % of entries with the largest magnitude are kept from each task vector. The sign of a
    weight's change is the sign of their sum over tasks, and the change is the mean of the entries
    with this sign, times the coefficient. Yadav et al., "TIES-Merging: Resolving Interference When
    Merging Models" (NeurIPS 2023).

    **Memory grows with the number of tasks**: it keeps one copy of the weights per task.
    """

    def __init__(self, coefficient: float = 0.55, start: Start = "pretrained") -> None:
        """
        :param coefficient: weight of the merged task vector, > 0.
        :param start: see :class:`TaskArithmetic`.
        """
        super().__init__(coefficient, start)
        self.tasks: list[dict[str, Tensor]] = []
        """The trimmed task vectors by parameter name, one entry per task."""

    def observe(self, task: Task) -> None:
        """Keep the task's vectors."""
        self.tasks = [*self.tasks, task.measured]

    def _trimmed(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        sizes = torch.cat([d.abs().flatten() for d in vectors.values()])
        kept = max(1, round(_TIES_DENSITY * len(sizes)))
        threshold = sizes.topk(kept, sorted=False).values.min()
        return {n: torch.where(d.abs() >= threshold, d, 0.0) for n, d in vectors.items()}

    def _combine(self, name: str, d: Tensor) -> Tensor:
        past = [in_shape(task.get(name), torch.zeros_like(d)) for task in self.tasks]
        vectors = torch.stack([*past, d])
        agree = vectors * vectors.sum(0).sign() > 0
        return (vectors * agree).sum(0) / agree.sum(0).clamp(min=1)
