"""Whether a CoVON posterior is learning its precision, in four numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covon_avalanche.optim.hessian import HessApprox, ema_weights

_NEAR = 0.1  # an entry within this fraction of hess_init counts as still there


class Diagnostics(NamedTuple):
    """Of one parameter, or of all together.

    ``hess_signal_to_noise``: root mean square of what the estimates have added to ``hess``,
    without the remainder of ``hess_init``, relative to their noise in the average. About 1: the
    estimate is dominated by noise. The noise follows the formulas in ``optim/hessian.py`` with
    the last step's gradient, so it varies from batch to batch; NaN if that gradient is gone.

    ``hess_at_start``: share of the entries of ``hess`` still within 10 % of ``hess_init``. Near
    1, the precision has not been learned and the posterior is nearly isotropic.

    ``prior_pull``: the prior's part of the update relative to the data's: root mean squares of
    ``prior_precision / ess * (mean - prior_mean)`` and of the gradient average.

    ``noise_to_weights``: standard deviation of the posterior relative to the weights (root mean
    squares).
    """

    hess_signal_to_noise: float
    hess_at_start: float
    prior_pull: float
    noise_to_weights: float


class Sums(NamedTuple):
    """Sums over a parameter's entries that the diagnostics are made of; they add up."""

    entries: int
    learned: float
    noise: float
    at_start: float
    prior: float
    data: float
    variance: float
    weights: float

    def diagnostics(self) -> Diagnostics:
        """The ratios."""
        return Diagnostics(
            hess_signal_to_noise=_ratio(self.learned, self.noise),
            hess_at_start=self.at_start / self.entries,
            prior_pull=_ratio(self.prior, self.data),
            noise_to_weights=_ratio(self.variance, self.weights),
        )


def diagnose(
    p: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    prior_precision: Tensor | float,
    hess_approx: HessApprox,
) -> Sums:
    """The sums of a parameter within a task.

    :param state: with ``hess``, ``momentum`` and ``step``.
    :param prior_precision: 1/weight².
    :param hess_approx: the estimator in use.
    """
    step, ess, hess, mean = state["step"], group["ess"], state["hess"], p.detach()
    beta1, beta2 = group["betas"]
    initial, average = ema_weights(beta2, step)
    precision = ess * hess + prior_precision
    moved = hess - group["hess_init"]
    prior_pull = (mean - state.get("prior_mean", 0.0)) * (prior_precision / ess)
    return Sums(
        entries=moved.numel(),
        learned=_squares(hess - initial * group["hess_init"]),
        noise=_noise(p.grad, group, hess, precision, hess_approx) * average,
        at_start=(moved.abs() <= _NEAR * group["hess_init"]).sum().item(),
        prior=_squares(prior_pull),
        data=_squares(state["momentum"] / (1 - beta1**step if group["debias"] else 1.0)),
        variance=(1 / precision).sum(dtype=torch.float64).item(),
        weights=_squares(mean),
    )


def add(sums: list[Sums]) -> Sums:
    """Over several parameters."""
    return Sums(*map(sum, zip(*sums, strict=True)))


def _noise(
    grad: Tensor | None,
    group: Mapping[str, Any],
    hess: Tensor,
    precision: Tensor,
    hess_approx: HessApprox,
) -> float:
    """Sum of the variances of a single estimate."""
    if hess_approx == "gradsq":
        return 2 * _squares(hess) / group["mc_samples"]
    if grad is None:
        return math.nan
    variances = grad.square() * precision
    return variances.sum(dtype=torch.float64).item() / group["mc_samples"]


def _squares(x: Tensor) -> float:
    return x.square().sum(dtype=torch.float64).item()


def _ratio(squares: float, others: float) -> float:
    """Of root mean squares."""
    if others == 0:
        return math.inf if squares > 0 else math.nan
    return math.sqrt(squares / others)
