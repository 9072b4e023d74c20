"""Eq. 8 as a merge rule."""

from __future__ import annotations

from torch import Tensor

from covon_avalanche.merging.rule import MergeRule, Task


class Eq8(MergeRule):
    """Precision-weighted merging, Eq. 8 of "Fast and Slow Variational Continual Learning"::

        s1 = s0 + γ (s - s0)
        m1 = ((1 - γ) s0 m0 + γ s m) / s1

    with the prior N(m0, 1/s0) and the posterior N(m, 1/s) of a ``CoVON`` optimizer, which does the
    merging in ``consolidate()`` with its own ``gamma`` and ``gamma_precision``; see
    :func:`covon_avalanche.posterior.merge`.
    """

    needs_posterior = True

    def merge(self, task: Task) -> dict[str, Tensor]:
        """Leave all parameters to the optimizer."""
        return {}
