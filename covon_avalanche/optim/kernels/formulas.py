"""The arithmetic of the steps: functions of tensors that return new tensors."""

from __future__ import annotations

from torch import Tensor


def covon_hess(hess: Tensor, estimate: Tensor, prior_hess: Tensor | float, beta2: float) -> Tensor:
    """New Hessian average, Algorithm 1, line 8.

    The last term is the retraction of Lin et al. (2020): with ``a = hess + prior_hess`` and
    ``r = (1 - beta2) * (estimate - hess) / a`` the new ``a`` is ``a * (1 + (1 + r)**2) / 2``,
    so it stays positive whatever the estimate, though ``hess`` alone may go below zero.

    :param hess: average so far, loss/weight².
    :param estimate: ``gradient * (theta - mean) / sigma²``, of the same unit.
    :param prior_hess: prior precision per example.
    """
    change = (1 - beta2) * (estimate - hess)
    return hess + change + 0.5 * change.square() / (hess + prior_hess)


def covon_mean(
    mean: Tensor,
    momentum: Tensor,
    hess: Tensor,
    prior_mean: Tensor | float,
    prior_hess: Tensor | float,
    *,
    lr: float,
    clip_radius: float,
) -> Tensor:
    """New mean, Algorithm 1, line 9: a Newton step on loss and prior, clipped elementwise.

    :param momentum: gradient average, bias-corrected, loss/weight.
    :param hess: the new Hessian average.
    """
    direction = (momentum + prior_hess * (mean - prior_mean)) / (hess + prior_hess)
    return mean - lr * direction.clamp(-clip_radius, clip_radius)


def adam_step(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's direction and its new moments (Kingma and Ba 2015, Algorithm 1)."""
    beta1, beta2 = betas
    exp_avg = exp_avg.lerp(grad, 1 - beta1)
    exp_avg_sq = exp_avg_sq.lerp(grad.square(), 1 - beta2)
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt() + eps
    return exp_avg / (1 - beta1**step) / denominator, exp_avg, exp_avg_sq
