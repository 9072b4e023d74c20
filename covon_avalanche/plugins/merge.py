"""Merging at the end of each task, for any strategy and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor

from covon_avalanche.merging.rule import MergeRule, check_optimizer, check_rule, merge_into
from covon_avalanche.optim import PosteriorOptimizer
from covon_avalanche.optim.covon import SlowStep
from covon_avalanche.plugins.posterior import PosteriorPlugin, check_order
from covon_avalanche.plugins.task_loader import (
    SECOND_MOMENTS_MB_SIZE,
    check_whole_task,
    task_autocast,
    task_loader,
)


class MergePlugin(SupervisedPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Merges the weights at the end of each task with a rule of ``covon_avalanche.merging``::

        Naive(model=model, optimizer=AdamW(model.parameters()), plugins=[MergePlugin(RegMean())])

    Works with any strategy and optimizer; with :class:`CoVONPlugin` use its ``merge`` argument
    instead. Give it to the strategy *before* other plugins, so that they see the merged weights
    at the end of an experience. Where the model has batch norm, its running statistics are
    re-estimated after the merge, in one more pass over the task's data. Keeps one copy of the
    weights during a task, if the rule needs it. Task identities are used for multi-head models
    only. Passes over the data use the strategy's ``autocast_dtype``, if it has one, as recipes with
    ``precision = "bfloat16"`` do.

    With ``eval_every=1`` the last evaluation inside ``train`` comes before the merge; call
    ``strategy.eval`` afterwards to evaluate the merged weights.
    """

    def __init__(self, rule: MergeRule) -> None:
        """
        :param rule: how to merge. It also stores what it needs of earlier tasks: create a new
            object for each strategy.
        """
        super().__init__()
        check_rule(rule)
        self.rule = rule
        self._before: dict[str, Tensor] = {}  # weights before the task

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        """Check that optimizer and plugins fit."""
        for plugin in strategy.plugins:
            if isinstance(plugin, PosteriorPlugin):
                raise ValueError(
                    f"{type(plugin).__name__} and MergePlugin would both merge: without "
                    "MergePlugin, CoVONPlugin(merge=...) takes the rule"
                )
        check_order(self, strategy)
        check_optimizer(strategy.optimizer)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Set the weights that training starts from, and copy them."""
        check_whole_task(strategy.experience)
        self.rule.begin_task(strategy.model)
        if isinstance(strategy.optimizer, PosteriorOptimizer):
            return
        if self.rule.needs_before and not self._before:  # kept if the task was interrupted
            self._before = {n: p.detach().clone() for n, p in strategy.model.named_parameters()}

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Merge at the end of a task."""
        merge_task(strategy, self.rule, self._before)
        self._before = {}


def merge_task(
    strategy: Any, rule: MergeRule | SlowStep, before: Mapping[str, Tensor] | None = None
) -> None:
    """Merge the strategy's weights at the end of a task, and re-estimate batch norm.

    :param rule: see :func:`~covon_avalanche.merging.merge_into`.
    :param before: weights before the task; not needed with a posterior optimizer.
    """
    augmented = isinstance(rule, MergeRule) and rule.augmented
    mb_size = strategy.train_mb_size if augmented else SECOND_MOMENTS_MB_SIZE
    with task_autocast(strategy):
        merge_into(
            strategy.model,
            strategy.optimizer,
            rule,
            before=before,
            batches=lambda: task_loader(strategy, mb_size, augmented=augmented),
            batch_norm_batches=lambda: task_loader(strategy, strategy.train_mb_size, shuffled=True),
        )
