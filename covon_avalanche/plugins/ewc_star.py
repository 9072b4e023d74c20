"""EWC* in an Avalanche strategy."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from covon_avalanche.checks import check_choice
from covon_avalanche.plugins.quadratic_anchor import QuadraticAnchorPlugin
from covon_avalanche.plugins.task_loader import task_loader
from covon_avalanche.posterior.fisher import squared_batch_gradients, squared_example_gradients

_FISHER = {"exact": squared_example_gradients, "batch": squared_batch_gradients}


class EWCStarPlugin(QuadraticAnchorPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """EWC with accumulated Fisher information and one anchor (Algorithm 3, "EWC*").

    Huszár's correction of EWC: one second-order expansion of all past tasks around the latest
    weights instead of one penalty per task, decoupled from the loss. The Fisher information is
    computed after each task in one pass over its data, with the evaluation transform and in
    eval mode. Task identities are used for multi-head models only.
    """

    def __init__(
        self,
        *,
        strength: float = 1.0,
        ess: float | None = None,
        weight_decay: float = 0.0,
        fisher: Literal["exact", "batch"] = "exact",
    ) -> None:
        """
        :param fisher: ``"exact"`` squares each example's gradient; ``"batch"`` squares gradients of
            mini-batches of the size used in training, and multiplies by this size, as the paper
            does.

        See :class:`QuadraticAnchorPlugin` for the others.
        """
        super().__init__(strength=strength, ess=ess, weight_decay=weight_decay)
        check_choice("fisher", fisher, list(_FISHER))
        self.fisher = fisher

    def _importance(self, strategy: Any) -> dict[str, Tensor]:
        batches = task_loader(strategy, strategy.train_mb_size)
        return _FISHER[self.fisher](strategy.model, batches, strategy._criterion)
