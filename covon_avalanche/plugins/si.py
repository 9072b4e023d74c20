"""Synaptic Intelligence in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

from covon_avalanche.checks import check_positive
from covon_avalanche.plugins.quadratic_penalty import PathPlugin
from covon_avalanche.posterior.gaussian import DiagGaussian


class SIPlugin(PathPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Synaptic Intelligence: the importance of a weight is its share of the decrease of the loss
    during training, per squared change::

        path = -sum over steps of g * (change of theta in the step)
        importance <- max(0, importance + path / ((change in the task)² + xi))

    and the loss has ``si_lambda * sum(importance * (theta - anchor)²)`` added, with the weights
    after the last task as the anchor. ``g`` is the gradient of the loss without this penalty.
    Zenke, Poole and Ganguli, "Continual Learning Through Synaptic Intelligence" (ICML 2017);
    written from the formulas of the paper and of the authors' code, which it follows
    (github.com/ganguli-lab/pathint). Avalanche's plugin (``avalanche-si`` in recipes) is the
    variant of Maltoni and Lomonaco (2019): it has a damping of 1e-7 and clips importances at 0.001.
    Task identities are not used.
    """

    def __init__(self, si_lambda: float, xi: float = 0.1) -> None:
        """
        :param si_lambda: weight of the penalty; 0.1 for the authors' permuted MNIST.
        :param xi: damping, in weight²; 0.1 for the authors' permuted MNIST, 0.001 for split
            CIFAR.
        """
        check_positive("si_lambda", si_lambda, zero=True)
        check_positive("xi", xi)
        super().__init__(si_lambda)
        self.xi = xi

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Begin the path of the task."""
        super().before_training_exp(strategy, **kwargs)
        self._begin_path(strategy)

    def _consolidated(self, strategy: Any) -> DiagGaussian:
        weights = {n: p.detach().clone() for n, p in strategy.model.named_parameters()}
        importance = {}
        for name, past in self.anchor.precision.items():
            change = weights[name] - self._start[name]
            importance[name] = (past + self._path[name] / (change.square() + self.xi)).relu()
        self._start, self._path = {}, {}
        return DiagGaussian(weights, importance)
