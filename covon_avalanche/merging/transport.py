"""Optimal transport between the classes of two domains, for DUCT."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from covon_avalanche.checks import check_positive
from covon_avalanche.float64 import in_double

_SINKHORN_STEPS = 1000
_SINKHORN_TOLERANCE = 1e-7


def transport_plan(cost: Tensor, reg: float) -> Tensor:
    """The entropically regularised transport plan between uniform distributions.

    Minimises ``sum(S * cost) + reg * sum(S * log(S))`` over the plans ``S`` with row sums 1/n and
    column sums 1/m, by Sinkhorn's iterations in the log domain, with float64.

    :param cost: of shape (n, m).
    :raises ValueError: unless ``reg`` is positive.
    """
    check_positive("reg", reg)
    n, m = cost.shape
    exact = in_double(cost)
    columns = exact.new_zeros(m)  # dual variables, in units of the cost
    annealed = max(reg, float(exact.max()))  # reg if a cost is NaN
    while True:  # from a large regularisation, for which few steps suffice
        for _ in range(_SINKHORN_STEPS):
            rows = -annealed * (torch.logsumexp((columns - exact) / annealed, 1) + math.log(n))
            columns = -annealed * (
                torch.logsumexp((rows[:, None] - exact) / annealed, 0) + math.log(m)
            )
            plan = torch.exp((rows[:, None] + columns - exact) / annealed)
            if (n * plan.sum(1) - 1).abs().max() < _SINKHORN_TOLERANCE:
                break
        if annealed == reg:
            return plan.to(cost)
        annealed = max(annealed / 2, reg)
