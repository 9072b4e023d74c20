"""Optimal transport between the classes of two domains, which moves a domain's classifier."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from covon_avalanche.checks import check_positive
from covon_avalanche.merging.linalg import in_double

_SINKHORN_STEPS = 1000
_SINKHORN_TOLERANCE = 1e-7


def transported(
    weight: Tensor,
    means: Tensor,
    new_weight: Tensor,
    new_means: Tensor,
    *,
    alpha: float,
    reg: float,
) -> Tensor:
    """An earlier domain's classifier ``W_o``, moved towards the current one ``W``.

    ``(1 - alpha) W_o + alpha C Sᵀ W``, where the plan ``S`` transports the current domain's class
    means to those of the earlier one, see :func:`transport_plan`, and ``C`` is the number of
    classes: in DUCT's released code, without ``C``, the second term is 1/C of a classifier's size.
    Classes that a domain lacks take no part.

    :param weight: ``W_o``, of shape (classes, width), as are the following.
    :param means: the earlier domain's class means, NaN for classes that it lacks.
    :param new_weight: ``W``.
    :param new_means: the current domain's class means, likewise.
    :param reg: entropic regularisation, in units of the distance.
    """
    old, new = ~means.isnan().any(1), ~new_means.isnan().any(1)
    plan = transport_plan(torch.cdist(new_means[new], means[old]), reg)
    moved = int(old.sum()) * plan.T @ new_weight[new]
    result = weight.clone()
    result[old] = (1 - alpha) * weight[old] + alpha * moved
    return result


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
