"""The fast step of CoVON, for one parameter: lines 6 to 9 of Algorithm 1 in "Fast and Slow
Variational Continual Learning".

``multi_tensor.step`` and ``cpu_kernel.step`` do the same for lists of parameters, faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from covon_avalanche.optim.hessian import HessApprox
from covon_avalanche.optim.natural_units import AVERAGING, inverse_rms
from covon_avalanche.optim.sharding import mean_everywhere


class StepSettings(NamedTuple):
    """Settings of one iteration, for the parameters of a group. See :class:`CoVON`."""

    i: int
    """Number of the iteration in the task, from 1."""
    ess: float
    lr: float
    beta1: float
    gradients_weight: float
    """Total weight of the gradients in line 7's average, which starts at 0."""
    beta2: float
    clip_radius: float
    hess_approx: HessApprox
    batch_size: float
    retraction: float
    """Factor of line 8's last term. Squared gradients, which are positive anyway, have none in
    natural units."""


def fast_step(
    mean: Tensor,
    statistic: Tensor,
    grad: Tensor,
    momentum: Tensor,
    hess: Tensor,
    prior_mean: Tensor | float,
    prior_precision: Tensor | float,
    settings: StepSettings,
    step_square: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """An iteration of Algorithm 1's inner loop for one parameter tensor, given the gradient.

    This is the reference implementation: to try a change, edit it and pass
    ``implementation="reference"``.

    :param statistic: average over the posterior samples of ``grad * (theta - mean)``, or, for
        ``"gradsq"``, of ``grad²``; theta was drawn with the variance of line 4.
    :param grad: average gradient of the mini-batch loss over the samples (line 5), loss/weight.
    :param step_square: in natural units, the running average of squared raw steps, a scalar.
    :return: new mean, momentum, hess and ``step_square``. All other tensors have the shape of the
        parameter.
    """
    i, ess, lr, beta1, weight, beta2, clip_radius, hess_approx, batch_size, retraction = settings
    delta = prior_precision / ess
    if hess_approx == "gradsq":
        hess_hat = batch_size * statistic
    else:
        hess_hat = statistic * (ess * hess + prior_precision)  # line 6; 1/sigma² of line 4
    momentum = torch.lerp(momentum, grad, 1 - beta1)  # line 7
    momentum_hat = momentum / weight
    # line 8; the retraction of its last term keeps hess + delta positive (Lin et al., 2020)
    change = (1 - beta2) * (hess_hat - hess)
    if retraction:  # in this order nothing overflows that the result does not
        change = change + retraction * change * (change / (hess + delta))
    hess = hess + change
    slope = momentum_hat + delta * (mean - prior_mean)
    if step_square is None:
        step = slope / (hess + delta)  # the Newton step
    else:  # natural units
        raw = mean_everywhere(grad.square() / (hess + delta))
        step_square = torch.lerp(step_square, raw.to(step_square), 1 - AVERAGING)
        step = inverse_rms(step_square, 1 - AVERAGING**i) * slope / (hess + delta).sqrt()
    mean = mean - lr * step.clamp(-clip_radius, clip_radius)  # line 9
    return mean, momentum, hess, step_square
