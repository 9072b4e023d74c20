"""Whether a CoVON posterior is learning its precision, in four numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from covon_avalanche.float64 import exact_sum
from covon_avalanche.optim.hessian import HessApprox, ema_weights
from covon_avalanche.optim.natural_units import ess_of, first_hess
from covon_avalanche.optim.posterior_optimizer import Group, State, current_prior
from covon_avalanche.optim.samples import pieces
from covon_avalanche.optim.sharding import local

_NEAR = 0.1  # an entry within this fraction of hess_init counts as still there
_SHARE_TO_WARN = 0.9  # of hess still near hess_init
_NOISE_TO_WARN = 5.0  # times the weights


class Diagnostics(NamedTuple):
    """Diagnostics of one parameter, or of all together.

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


def diagnose(
    parameters: Sequence[tuple[Tensor, Group, State]], hess_approx: HessApprox
) -> Diagnostics:
    """The diagnostics of parameters within a task, pooled over their entries; of sharded ones over
    those of this process.

    :param parameters: with their groups and states, which contain the ``mean``.
    """
    entries = at_start = 0
    learned = noise = pull = data = variance = weights = 0.0
    for p, group, state in parameters:
        step, ess = state["step"], ess_of(group)
        start = first_hess(group, state["scale"]) if "scale" in state else group["hess_init"]
        beta1, beta2 = group["betas"]
        initial, squared_weights = ema_weights(beta2, step)
        tensors = state["mean"], p.grad, state["hess"], state["momentum"]
        prior = current_prior(state, group)
        for mean, grad, hess, momentum, m0, s0 in pieces(*map(local, tensors + prior)):
            precision = ess * hess + s0
            near = (hess - start).abs() <= _NEAR * start
            entries += hess.numel()
            at_start += int(near.sum())
            learned += _squares(hess - initial * start)
            if hess_approx == "gradsq":  # the variance of a single estimate
                single = 2 * _squares(hess)
            elif grad is None:
                single = math.nan
            else:
                single = exact_sum(grad.square() * precision).item()
            noise += single / group["mc_samples"] * squared_weights
            pull += _squares((mean - m0) * (s0 / ess))
            data += _squares(momentum / (1 - beta1**step if group["debias"] else 1.0))
            variance += exact_sum(1 / precision).item()
            weights += _squares(mean)
    return Diagnostics(
        hess_signal_to_noise=_ratio(learned, noise),
        hess_at_start=at_start / entries if entries else math.nan,  # a process may have none
        prior_pull=_ratio(pull, data),
        noise_to_weights=_ratio(variance, weights),
    )


def warn_unless_learned(steps: int, found: Diagnostics) -> None:
    """Warn if a task of many steps has left the precision as it began."""
    if found.hess_at_start > _SHARE_TO_WARN:
        warnings.warn(
            f"the posterior has not learned its precision: after {steps} steps "
            f"{found.hess_at_start:.0%} of the entries of hess are within 10 % of hess_init, so "
            "the prior it becomes is nearly isotropic; lower beta2 (None adapts to the task), "
            "choose hess_init nearer to the curvature, or see optimizer.diagnostics() before "
            "consolidate()",
            stacklevel=3,
        )
    if found.noise_to_weights > _NOISE_TO_WARN:
        warnings.warn(
            f"the noise has grown to {found.noise_to_weights:.1f} times the weights, because the "
            "data have added little precision: check the accuracy, normalize the inputs, or raise "
            "data_precision (ess)",
            stacklevel=3,
        )


def _squares(x: Tensor) -> float:
    return exact_sum(x.square()).item()


def _ratio(squares: float, others: float) -> float:
    """Ratio of root mean squares."""
    if others == 0:
        return math.inf if squares > 0 else math.nan
    return math.sqrt(squares / others)
