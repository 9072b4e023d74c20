"""Estimates of the Hessian's diagonal from one posterior sample, and their average.

With ``g`` the gradient of a mini-batch's mean loss over ``B`` examples at the sample ``theta``,
``g_i`` an example's own gradient, and sigma² the posterior's variance:

``gradsq``
    ``B g²``. Its expectation over mini-batches is ``(B - 1) E[g_i]² + E[g_i²]``, so near a
    minimum, where gradients average to zero, it is the empirical Fisher. Never negative; its
    noise does not depend on ``ess`` (for Gaussian gradients it is sqrt(2) times its mean).
``reparam``
    ``g (theta - mean) / sigma²``, the paper's. By Stein's identity its expectation over theta is
    the expected Hessian, exactly, of either sign (Shen et al., 2024, section 2). Its standard
    deviation is about ``|g| / sigma = |g| sqrt(ess * hess + prior_precision)``, so it grows
    with ``ess`` and hides a Hessian smaller than ``g² * ess``.

The average of these estimates should be short against the task, because what protects a task
is the curvature at its end, and long enough to average out their noise. The length of a task is
not known at a step, but the number of its steps so far is: with ``beta2=None`` the window
is a fixed share of them. After ``t`` steps an estimate made at step ``s`` has a weight about
proportional to ``(s / t)^9`` ("polynomial-decay averaging", Shamir and Zhang, ICML 2013,
section 4).
"""

from __future__ import annotations

from typing import Literal

HessApprox = Literal["gradsq", "reparam"]


def beta2_at(beta2: float | None, step: int) -> float:
    """The averaging coefficient of a step.

    :param beta2: the same in all steps (Algorithm 1), or ``None`` for the growing window.
    :param step: number of the task's steps before this one.
    """
    return 1 - 1 / (50 + 0.1 * step) if beta2 is None else beta2
