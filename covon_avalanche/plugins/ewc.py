"""Elastic weight consolidation in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

from covon_avalanche.checks import check_positive
from covon_avalanche.optim.quadratic_anchor import added
from covon_avalanche.plugins.quadratic_penalty import QuadraticPenaltyPlugin
from covon_avalanche.plugins.task_loader import task_autocast, task_loader
from covon_avalanche.posterior.fisher import squared_example_gradients
from covon_avalanche.posterior.gaussian import DiagGaussian


class EWCPlugin(QuadraticPenaltyPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """EWC with one penalty per task: the loss has
    ``ewc_lambda / 2 * sum over tasks t of sum(F_t (theta - theta_t)²)`` added.

    Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks" (PNAS 2017), Eq. 3.
    The sum of the penalties is one quadratic, which is stored instead: its precision is the sum of
    the ``F_t``, its centre the mean of the ``theta_t`` weighted by the ``F_t``. Memory and time do
    not grow with the number of tasks. ``F_t`` is the diagonal Fisher information of the task's data
    at ``theta_t``: squared gradients of single examples, with the data's labels, the evaluation
    transform and the model in evaluation mode, so that neither batches nor their order matter.
    Avalanche's plugin (``avalanche-ewc`` in recipes) squares gradients of batches, and has no
    factor 1/2. Task identities are used for multi-head models only.
    """

    def __init__(self, ewc_lambda: float) -> None:
        """
        :param ewc_lambda: weight of the penalty.
        """
        check_positive("ewc_lambda", ewc_lambda, zero=True)
        super().__init__(ewc_lambda / 2)

    def _consolidated(self, strategy: Any) -> DiagGaussian:
        batches = task_loader(strategy, strategy.train_mb_size)
        with task_autocast(strategy):
            fisher = squared_example_gradients(strategy.model, batches, strategy._criterion)
        return added(self.anchor, strategy.model.named_parameters(), fisher)
