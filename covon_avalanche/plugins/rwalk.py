"""Riemannian Walk in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from covon_avalanche.checks import check_fraction, check_positive, check_whole
from covon_avalanche.plugins.quadratic_penalty import PathPlugin
from covon_avalanche.posterior.gaussian import DiagGaussian, embed

_DAMPING = 1e-3  # the authors' code


class RWalkPlugin(PathPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Riemannian Walk: a running Fisher information, and each weight's contribution to the decrease
    of the loss, relative to its distance in the metric of that information.

    The loss has ``rwalk_lambda * sum((F / max F + s / max s) (theta - anchor)²)`` added, with the
    weights after the last task as the anchor. After every ``delta_t`` steps::

        s' <- s' + max(0, path / (F * (change in these steps)² + 0.001))
        F <- fisher_decay * (mean of g² over the steps) + (1 - fisher_decay) * F

    with the gradient ``g`` of the loss without the penalty, and ``path`` as in :class:`SIPlugin`.
    ``F`` is kept from task to task; in the very first window it is the mean of g² of that window.
    ``s`` is the first task's ``s'``, then averaged with that of each new task. Chaudhry et al.,
    "Riemannian Walk for Incremental Learning" (ECCV 2018); written from the formulas of the paper
    and of the authors' code (github.com/facebookresearch/agem). As in that code, the distance has
    no factor 1/2. The code starts with ``F = 0``, sums g² from the beginning of a task, and adds
    the mean of both scores to the old one. A last window is used even if it is incomplete.
    Avalanche's plugin (``avalanche-rwalk`` in recipes) computes a second gradient in each step and
    leaves the model in evaluation mode, so that it is trained without dropout and batch statistics.
    Task identities are not used.
    """

    def __init__(self, rwalk_lambda: float, fisher_decay: float = 0.9, delta_t: int = 50) -> None:
        """
        :param rwalk_lambda: weight of the penalty.
        :param fisher_decay: weight of the new squared gradients, in (0, 1].
        :param delta_t: steps between updates of the Fisher information and the scores; the authors
            use 50, and 10 for permuted MNIST.
        """
        check_positive("rwalk_lambda", rwalk_lambda, zero=True)
        check_fraction("fisher_decay", fisher_decay)
        check_whole("delta_t", delta_t)
        super().__init__(rwalk_lambda)
        self.fisher_decay = fisher_decay
        self.delta_t = delta_t
        self.fisher: dict[str, Tensor] = {}
        """``F`` by parameter name; empty before the first update."""
        self.scores: dict[str, Tensor] = {}
        """``s`` by parameter name; empty before the end of the first task."""
        self._new: dict[str, Tensor] = {}  # s'
        self._squares: dict[str, Tensor] = {}
        self._steps = 0  # in the window

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Begin a window; the Fisher information and the score of new weights are 0."""
        super().before_training_exp(strategy, **kwargs)
        self._open_window(strategy)
        zeros = {n: torch.zeros_like(path) for n, path in self._path.items()}
        if self.fisher:
            self.fisher = {**zeros, **{n: embed(f, zeros[n]) for n, f in self.fisher.items()}}
        if self.scores:
            self.scores = {**zeros, **{n: embed(s, zeros[n]) for n, s in self.scores.items()}}
        self._new = {n: z.clone() for n, z in zeros.items()}  # changed in place

    def _open_window(self, strategy: Any) -> None:
        self._begin_path(strategy)
        self._squares = {n: torch.zeros_like(path) for n, path in self._path.items()}
        self._steps = 0

    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Follow the step, and close a complete window."""
        for name, (_, gradient, _) in self._step.items():
            self._squares[name].addcmul_(gradient, gradient)
        super().after_update(strategy, **kwargs)
        self._steps += 1
        if self._steps == self.delta_t:
            self._close_window(strategy)

    @torch.no_grad()
    def _close_window(self, strategy: Any) -> None:
        if self._steps == 0:
            return
        found = {name: total / self._steps for name, total in self._squares.items()}
        fisher = self.fisher or found  # of before these steps
        for name, p in strategy.model.named_parameters():
            distance = fisher[name] * (p - self._start[name]).square()
            self._new[name] += (self._path[name] / (distance + _DAMPING)).relu()
        decay = 1 - self.fisher_decay
        self.fisher = {name: f.lerp(fisher[name], decay) for name, f in found.items()}
        self._open_window(strategy)

    def _consolidated(self, strategy: Any) -> DiagGaussian:
        self._close_window(strategy)
        if not self.fisher:  # no step so far
            return self.anchor
        new = self._new
        self.scores = {n: (self.scores[n] + s) / 2 for n, s in new.items()} if self.scores else new
        parts = [_of_largest(self.fisher), _of_largest(self.scores)]
        weights = {n: p.detach().clone() for n, p in strategy.model.named_parameters()}
        self._new, self._start, self._path, self._squares = {}, {}, {}, {}
        return DiagGaussian(weights, {n: parts[0][n] + parts[1][n] for n in weights})


def _of_largest(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values >= 0, divided by the largest of all."""
    largest = max(float(value.max()) for value in values.values() if value.numel())
    return {name: value / largest if largest > 0 else value for name, value in values.items()}
