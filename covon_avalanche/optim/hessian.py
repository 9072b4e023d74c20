"""Estimates of the Hessian's diagonal from one posterior sample, and their noise.

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
"""

from __future__ import annotations

from typing import Literal

HessApprox = Literal["gradsq", "reparam"]
