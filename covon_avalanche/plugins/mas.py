"""Memory Aware Synapses in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from covon_avalanche.checks import check_positive
from covon_avalanche.optim.quadratic_anchor import accumulated
from covon_avalanche.plugins.quadratic_penalty import QuadraticPenaltyPlugin
from covon_avalanche.plugins.task_loader import task_autocast, task_loader
from covon_avalanche.posterior.fisher import absolute_example_gradients
from covon_avalanche.posterior.gaussian import DiagGaussian


class MASPlugin(QuadraticPenaltyPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Memory Aware Synapses: the importance of a weight is the sensitivity of the outputs.

    The loss has ``mas_lambda * sum(importance * (theta - anchor)²)`` added, with the weights after
    the last task as the anchor. The importance is the mean over a task's examples of the absolute
    gradient of the squared L2 norm of the outputs, in evaluation mode, summed over the tasks.
    Labels are not used. Aljundi et al., "Memory Aware Synapses: Learning what (not) to forget"
    (ECCV 2018). The authors' code takes absolute values of gradients that are summed over a batch;
    this follows the paper's Eq. 2, example by example. Avalanche's plugin (``avalanche-mas`` in
    recipes) measures importances in training mode and averages them over tasks, so that early tasks
    are forgotten. Task identities are used for multi-head models only.
    """

    def __init__(self, mas_lambda: float) -> None:
        """
        :param mas_lambda: weight of the penalty; the authors use 1.
        """
        check_positive("mas_lambda", mas_lambda, zero=True)
        super().__init__(mas_lambda)

    def _consolidated(self, strategy: Any) -> DiagGaussian:
        batches = task_loader(strategy, strategy.train_mb_size)
        with task_autocast(strategy):
            importance = absolute_example_gradients(strategy.model, batches, _squared_norm)
        return accumulated(self.anchor, strategy.model.named_parameters(), importance, 1.0)


def _squared_norm(output: Tensor, target: Tensor) -> Tensor:
    """Squared L2 norm of the outputs, averaged over the batch."""
    return output.square().sum() / len(output)
