"""Elastic variational continual learning in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

from covon_avalanche.checks import check_positive
from covon_avalanche.plugins.posterior import VCLPlugin
from covon_avalanche.plugins.task_loader import task_loader
from covon_avalanche.posterior.fisher import squared_example_gradients


class EVCLPlugin(VCLPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """VCL with an elastic penalty on means and standard deviations; needs a
    ``BayesByBackprop`` optimizer.

    Batra and Clark, "EVCL: Elastic Variational Continual Learning with Weight Consolidation"
    (2024): adds to the KL divergence ``strength / 2 * sum(F ((m - m')² + (std - std')²))``,
    where N(m', std'²) is the previous posterior and F the Fisher information summed over past
    tasks, computed exactly in a pass over each task's data at the posterior mean. The penalty
    is on the scale of the loss per example. (In the authors' released code it is never
    back-propagated, and F is zero.) Task identities are used for multi-head models only.
    """

    def __init__(self, *, strength: float = 1.0, **options: Any) -> None:
        """
        :param strength: weight of the penalty.
        :param options: see :class:`PosteriorPlugin`.
        """
        super().__init__(**options)
        check_positive("strength", strength, zero=True)
        self.strength = strength

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Pass the strength to the optimizer."""
        super().before_training_exp(strategy, **kwargs)
        for group in strategy.optimizer.param_groups:
            group["importance_strength"] = self.strength

    def _consolidate(self, strategy: Any) -> None:
        batches = task_loader(strategy, strategy.train_mb_size)
        fisher = squared_example_gradients(strategy.model, batches, strategy._criterion)
        parameters = dict(strategy.model.named_parameters())
        importance = {parameters[name]: value for name, value in fisher.items()}
        strategy.optimizer.consolidate(importance=importance)
