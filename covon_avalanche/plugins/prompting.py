"""Prompt methods in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

import torch
from avalanche.training.plugins import SupervisedPlugin

from covon_avalanche.checks import check_positive
from covon_avalanche.plugins.task_loader import begin_domain, task_loader
from covon_avalanche.prompting import PromptModel


class PromptPlugin(SupervisedPlugin):
    """Trains a :class:`PromptModel`, domain by domain::

        model = SPrompts(create_backbone("vit-b16-in21k-ft-in1k", 345, weights="default"), 6)
        optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
        Naive(model=model, optimizer=optimizer, plugins=[PromptPlugin()])

    The optimizer may hold all parameters: those of other domains are frozen. Each domain starts
    with a new state of the optimizer, unless that is a posterior. A domain whose training was
    interrupted does not count: the next one takes its place. Does not use task identities.
    """

    def __init__(self, max_grad_norm: float | None = None) -> None:
        """
        :param max_grad_norm: clip the gradients' common norm, as L2P does at 1.
        """
        super().__init__()
        if max_grad_norm is not None:
            check_positive("max_grad_norm", max_grad_norm)
        self.max_grad_norm = max_grad_norm

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Begin a domain.

        :raises ValueError: if the strategy's model is not a :class:`PromptModel`, or was created
            for fewer domains.
        """
        begin_domain(
            strategy,
            PromptModel,
            needs="PromptPlugin needs a PromptModel",
            hint="choose a method of covon_avalanche.prompting",
        )

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """Add the method's own loss, such as that of keys."""
        strategy.loss = strategy.loss + strategy.model.auxiliary_loss

    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """Clip gradients."""
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(strategy.model.parameters(), self.max_grad_norm)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """End the domain; the model passes over its data with the evaluation transform."""
        strategy.model.end_domain(lambda: task_loader(strategy, strategy.eval_mb_size))
        strategy.model.in_domain = False
