"""Learning without Forgetting in an Avalanche strategy."""

from __future__ import annotations

import copy
from typing import Any

import torch
from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor, nn

from covon_avalanche.checks import check_class_ids, check_logits, check_positive
from covon_avalanche.plugins.task_loader import (
    check_one_head,
    check_whole_task,
    task_autocast,
    task_loader,
)


class LwFPlugin(SupervisedPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Learning without Forgetting: distils the model from before the task, on the task's inputs.

    The loss has ``alpha * KL(teacher || model)`` added, the mean over the batch of the divergence
    between softmaxes of the logits divided by ``temperature``, over the classes of earlier tasks,
    without a factor ``temperature²``.
    The teacher, a copy of the model at the end of the last task, is in evaluation mode; that of
    Avalanche's plugin (``avalanche-lwf`` in recipes) stays in training mode, so that dropout
    changes what is distilled. Li and Hoiem, "Learning without Forgetting" (TPAMI 2018). The authors
    first train new outputs with all other weights frozen; in a domain-incremental stream there are
    no new outputs. Keeps a copy of the model. Task identities are not used.
    """

    reads_merged_weights = True

    def __init__(self, alpha: float = 1.0, temperature: float = 2.0) -> None:
        """
        :param alpha: weight of the distillation.
        :param temperature: of both softmaxes.
        """
        super().__init__()
        check_positive("alpha", alpha, zero=True)
        check_positive("temperature", temperature)
        self.alpha = alpha
        self.temperature = temperature
        self.teacher: nn.Module | None = None
        """The model after the last task."""
        self.classes: list[int] = []
        """Classes of earlier tasks."""

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Check that there is one head for all tasks."""
        check_whole_task(strategy.experience)
        check_one_head(self, strategy.model, ": use Avalanche's LwFPlugin")

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """Add the distillation loss."""
        check_logits("LwFPlugin", strategy.mb_output)
        check_class_ids("LwFPlugin's targets", strategy.mb_y)
        if self.teacher is None or self.alpha == 0:
            return
        with torch.no_grad(), task_autocast(strategy):
            teacher = self.teacher(strategy.mb_x).float()
        strategy.loss += self.alpha * self._divergence(strategy.mb_output, teacher)

    def _divergence(self, output: Tensor, teacher: Tensor) -> Tensor:
        log_p = (output[:, self.classes] / self.temperature).log_softmax(1)
        log_q = (teacher[:, self.classes] / self.temperature).log_softmax(1)
        return nn.functional.kl_div(log_p, log_q, reduction="batchmean", log_target=True)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """The model becomes the teacher."""
        self.teacher = copy.deepcopy(strategy.model).eval().requires_grad_(False)
        targets = getattr(strategy.experience.dataset, "targets", None)
        if targets is not None:
            new = {int(y) for y in targets.uniques}
        else:  # a benchmark of plain data sets
            new = {int(y) for _, ys, *_ in task_loader(strategy, strategy.eval_mb_size) for y in ys}
        self.classes = sorted({*self.classes, *new})
