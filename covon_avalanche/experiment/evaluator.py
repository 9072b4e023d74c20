"""Avalanche's evaluation plugin without what it does for nobody."""

from __future__ import annotations

from typing import Any

from avalanche.evaluation import PluginMetric
from avalanche.training.plugins import EvaluationPlugin


class Evaluator(EvaluationPlugin):
    """Skips the callbacks that no metric has, where there are no loggers.

    Avalanche's plugin has all callbacks, eight in each iteration, and copies the experience in
    each before it looks whether a metric has that one: a twentieth of the time of a small
    network.
    """

    def _update_metrics_and_loggers(self, strategy: Any, callback: str) -> Any:
        if self.loggers or any(_has_own(metric, callback) for metric in self.metrics):
            return super()._update_metrics_and_loggers(strategy, callback)
        return None


def _has_own(metric: Any, callback: str) -> bool:
    """Whether it does something there: the base class has all callbacks, which do nothing."""
    method = getattr(metric, callback, None)
    of_base = getattr(PluginMetric, callback, None)
    return method is not None and getattr(method, "__func__", method) is not of_base
