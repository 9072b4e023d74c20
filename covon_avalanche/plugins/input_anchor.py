"""Anchoring layers by the second moments of their inputs, in any Avalanche strategy."""

from __future__ import annotations

from typing import Any

from avalanche.training.plugins import SupervisedPlugin

from covon_avalanche.merging import InputAnchor, RegMean
from covon_avalanche.plugins.task_loader import (
    SECOND_MOMENTS_MB_SIZE,
    check_whole_task,
    task_autocast,
    task_loader,
)


class InputAnchorPlugin(SupervisedPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Pulls layers toward the weights after the last task, along the inputs of earlier tasks; see
    :class:`~covon_avalanche.merging.InputAnchor`::

        Naive(model=model, optimizer=AdamW(model.parameters()), plugins=[InputAnchorPlugin(0.01)])

    Works with any strategy and optimizer, beside :class:`CoVONPlugin`, too. Give it to the strategy
    *after* a plugin that merges, so that it anchors the merged weights. Passes over each task's
    data once, unless a ``rule`` does. Passes compute at the strategy's ``autocast_dtype``, if it
    has one.
    """

    def __init__(self, strength: float, rule: RegMean | None = None) -> None:
        """See :class:`~covon_avalanche.merging.InputAnchor`."""
        super().__init__()
        self.anchor = InputAnchor(strength, rule)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Refuse parts of tasks."""
        check_whole_task(strategy.experience)

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Pull."""
        examples = len(strategy.experience.dataset)
        self.anchor.pull_(strategy.model, strategy.optimizer, examples)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Add the task."""
        with task_autocast(strategy):
            self.anchor.observe(
                strategy.model, lambda: task_loader(strategy, SECOND_MOMENTS_MB_SIZE)
            )
