"""What a posterior sample tells about the curvature: the estimators of CoVON's ``hess``.

Each is a function of a parameter at its mean, of the sample theta and of the gradient there,
and estimates the diagonal of the Hessian of the loss per example, or a positive stand-in for
it. It may use up theta's memory. With ``g`` the gradient of a mini-batch's mean loss over
``B`` examples, ``g_i`` an example's own, and sigma² the posterior's variance:

``reparam``
    ``g (theta - mean) / sigma²``. Stein's identity: the expectation over theta is the
    expected Hessian, exactly, of either sign (Shen et al., 2024, section 2). Its standard
    deviation is about ``|g| / sigma = |g| sqrt(ess * hess + prior_precision)``, so it grows
    with ``ess`` and hides a Hessian smaller than ``g² * ess``.
``gradsq``
    ``B g²``. The expectation over mini-batches is ``(B - 1) E[g_i]² + E[g_i²]``, so near a
    minimum, where gradients average to zero, that of the exact one. Never negative; its
    noise does not depend on ``ess`` (for Gaussian gradients it is sqrt(2) times its mean).
``per_example``
    ``sum_i g_i² / B``, the empirical Fisher of the batch, as in VOGN (Khan et al., 2018).
    The least noise; needs ``covon_avalanche.posterior.fisher.track_example_squares(model)``, which
    costs about another product per layer in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

HessApprox = Literal["auto", "reparam", "gradsq", "per_example"]


@dataclass(frozen=True)
class Curvature:
    """A statistic of a sample.

    :param of: maps (parameter, theta, gradient) to the statistic, possibly in theta's memory.
    :param power: of the gradient in it; how it follows if the gradient is scaled afterwards.
    :param from_gradient: whether it is computed from the gradient it is given. With one sample
        that happens at the step, so scaling or clipping before it is already included.
    """

    of: Callable[[Tensor, Tensor, Tensor], Tensor]
    power: int
    from_gradient: bool


GRADIENT_TIMES_NOISE = Curvature(
    lambda p, theta, grad: theta.sub_(p).mul_(grad), power=1, from_gradient=True
)
"""``g (theta - mean)``, which the kernels multiply by the precision: ``reparam``."""


def squared_gradient(batch_size: Callable[[], float]) -> Curvature:
    """``B g²``: ``gradsq``.

    :param batch_size: tells the examples behind a gradient.
    """

    def of(p: Tensor, theta: Tensor, grad: Tensor) -> Tensor:
        return theta.copy_(grad).square_().mul_(batch_size())

    return Curvature(of, power=2, from_gradient=True)


def squared_example_gradients(name: Callable[[Tensor], str]) -> Curvature:
    """``sum_i g_i² / B``, left in ``parameter.example_squares`` by
    :func:`covon_avalanche.posterior.fisher.track_example_squares`: ``per_example``.

    :param name: of a parameter, for the error.
    """

    def of(p: Tensor, theta: Tensor, grad: Tensor) -> Tensor:
        squares = getattr(p, "example_squares", None)
        if squares is None:
            raise RuntimeError(
                f"hess_approx='per_example' found no squared gradients for {name(p)!r}: call "
                "covon_avalanche.posterior.fisher.track_example_squares(model) before training, and "
                "freeze what takes no part in the forward pass (a gradient from a penalty has no examples)"
            )
        del p.example_squares  # type: ignore[attr-defined]
        return theta.copy_(squares)

    return Curvature(of, power=2, from_gradient=False)
