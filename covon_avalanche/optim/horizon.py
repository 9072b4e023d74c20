"""How far back the average of the Hessian reaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHORTEST = 20  # steps, at the start of a task


def betas_at(group: Mapping[str, Any], step: int) -> tuple[float, float]:
    """Averaging coefficients for the step after so many steps of the task.

    With ``1 - beta2 = 1 / (c + f * step)`` the weight of step k in the average after t steps is
    proportional to about ``(c / f + k) ** (1 / f - 1)``: polynomial-decay averaging (Shamir and
    Zhang, ICML 2013), which forgets the beginning of the task at any length of it, here with
    ``f = hess_horizon``.
    """
    beta1, beta2 = group["betas"]
    if group["hess_horizon"] is None:
        return beta1, beta2
    return beta1, min(beta2, 1 - 1 / (_SHORTEST + group["hess_horizon"] * step))
