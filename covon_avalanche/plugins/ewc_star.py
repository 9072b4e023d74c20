"""EWC* in an Avalanche strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from covon_avalanche.optim.checks import check_whole
from covon_avalanche.plugins.anchored import AnchoredPlugin
from covon_avalanche.plugins.schedule import Schedule
from covon_avalanche.plugins.task_batches import task_batches
from covon_avalanche.posterior.fisher import squared_batch_gradients, squared_example_gradients

_FISHER: dict[str, Callable[..., dict[str, Tensor]]] = {
    "exact": squared_example_gradients,
    "batch": squared_batch_gradients,
}


class EWCStarPlugin(AnchoredPlugin):
    """EWC with accumulated Fisher information and one anchor (Algorithm 3, "EWC*").

    Huszár's correction of EWC: a second-order expansion of all past tasks around the latest
    weights, instead of one penalty per task; the regulariser is decoupled from the loss.
    The Fisher is computed after each task in one pass over its data, with the evaluation
    transform and in eval mode. Task identities are used for multi-head models only.
    """

    def __init__(
        self,
        *,
        strength: float = 1.0,
        ess: float | None = None,
        weight_decay: float = 0.0,
        fisher: Literal["exact", "batch"] = "exact",
        fisher_mb_size: int = 256,
        train_transform: bool = False,
        train_mode: bool = False,
        schedule: Schedule | None = None,
    ) -> None:
        """
        :param fisher: ``"exact"`` squares each example's gradient; ``"batch"`` squares those
            of mini-batches and multiplies by their size, as the paper does.
        :param fisher_mb_size: examples per batch of the Fisher pass.
        :param train_transform: use the training transform in the Fisher pass.
        :param train_mode: run the model in training mode there.

        See :class:`AnchoredPlugin` for the others.
        """
        super().__init__(strength=strength, ess=ess, weight_decay=weight_decay, schedule=schedule)
        if fisher not in _FISHER:
            raise ValueError(f"fisher must be one of {sorted(_FISHER)}, got {fisher!r}")
        check_whole("fisher_mb_size", fisher_mb_size)
        self.fisher = fisher
        self.fisher_mb_size = fisher_mb_size
        self.train_transform = train_transform
        self.train_mode = train_mode

    def _importance(self, strategy: Any) -> dict[str, Tensor]:
        return _FISHER[self.fisher](
            strategy.model,
            task_batches(strategy, self.fisher_mb_size, train_transform=self.train_transform),
            strategy._criterion,
            train_mode=self.train_mode,
        )
