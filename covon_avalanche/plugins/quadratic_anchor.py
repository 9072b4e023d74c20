"""The quadratic anchor of Ada-Reg and EWC* in an Avalanche strategy."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor

from covon_avalanche.checks import check_positive
from covon_avalanche.optim import PosteriorOptimizer
from covon_avalanche.optim.quadratic_anchor import accumulated, check_finite, grown, pull_
from covon_avalanche.plugins.task_loader import check_whole_task
from covon_avalanche.posterior.gaussian import DiagGaussian


class QuadraticAnchorPlugin(SupervisedPlugin):
    """Base of :class:`AdaRegPlugin` and :class:`EWCStarPlugin`.

    Keeps one anchor (the weights after the last task) and one accumulated precision. Each
    optimizer step also pulls the weights toward the anchor by ``lr * precision / ess``, decoupled
    from the loss like AdamW's weight decay (:mod:`covon_avalanche.optim.quadratic_anchor`). Memory
    is constant in the number of tasks.
    """

    reads_merged_weights = True

    def __init__(
        self,
        *,
        strength: float = 1.0,
        ess: float | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        """
        :param strength: multiplies each task's importance, and so sets the regularisation:
            ``ess`` nearly cancels between accumulating the precision and using it.
        :param ess: effective sample size of a task, in examples; by default the size of
            the task's data.
        :param weight_decay: precision per example of the first prior N(0, 1/s0), that is
            ``s0 = ess * weight_decay``, to which later tasks add. It replaces the optimizer's own
            weight decay: set that to 0 (AdamW's default is 0.01).
        """
        super().__init__()
        check_positive("strength", strength, zero=True)
        check_positive("weight_decay", weight_decay, zero=True)
        if ess is not None:
            check_positive("ess", ess)
        self.strength = strength
        self.ess = ess
        self.weight_decay = weight_decay
        self.anchor = DiagGaussian({}, {})
        """The weights after the last task, and the precision of the pull toward them."""
        self._ess_now = 1.0
        self._largest: dict[str, float] = {}  # largest precision by name: often no implicit pull

    @abstractmethod
    def _importance(self, strategy: Any) -> dict[str, Tensor]:
        """Curvature per example of the task just trained, by parameter name."""

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Set this task's ``ess``, and extend the anchor if the model grew."""
        check_whole_task(strategy.experience)
        if isinstance(strategy.optimizer, PosteriorOptimizer):
            raise ValueError(
                f"{type(self).__name__} pulls the weights past the optimizer: use one without a "
                f"posterior, got {type(strategy.optimizer).__name__}, or EWCPlugin"
            )
        size = len(strategy.adapted_dataset)
        self._ess_now = float(size if self.ess is None else self.ess)
        first = self._ess_now * self.weight_decay  # precision of new entries
        self.anchor = grown(self.anchor, strategy.model.named_parameters(), first)
        precision = self.anchor.precision
        self._largest = {name: s.max().item() for name, s in precision.items() if s.numel()}

    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """The explicit pull, before the optimizer step."""
        self._pull(strategy, implicit=False)

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """The implicit pull, after the optimizer step."""
        self._pull(strategy, implicit=True)

    def _pull(self, strategy: Any, implicit: bool) -> None:
        pull_(
            strategy.model.named_parameters(),
            strategy.optimizer,
            self.anchor,
            self._ess_now,
            self._largest,
            implicit=implicit,
        )

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Take the weights as the anchor, and add the task's importance to the precision."""
        self.anchor = accumulated(
            self.anchor,
            strategy.model.named_parameters(),
            self._importance(strategy),
            self.strength * self._ess_now,
        )
        check_finite(self.anchor)
