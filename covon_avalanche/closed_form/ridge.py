"""Ridge regression in closed form, from sums over the examples.

With features ``H``, one row per example, and targets ``Y``, the sums are ``G = HᵀH`` and
``Q = HᵀY``, in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ridge_weight(gram: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """``(G + ridge I)⁻¹ Q``; with a larger ridge where that is numerically singular.

    :param gram: ``G``, of shape (width, width).
    :param targets: ``Q``, of shape (width, outputs).
    :raises FloatingPointError: if the features were not finite.
    """
    if not torch.isfinite(gram).all():
        raise FloatingPointError("the features of the network are not finite")
    while True:
        regularised = gram.clone()
        regularised.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(regularised)
        if not failed:
            return torch.cholesky_solve(targets, factor)
        ridge *= 10


def standardized_ridge_weight(gram: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """The weight for features that are centred and divided by their standard deviations, and an
    intercept that the ridge leaves alone, in terms of the features themselves.

    A constant feature is centred, but not scaled.

    :param gram: ``G`` of the features and, as the last, the constant 1.
    :param targets: ``Q`` likewise.
    :return: of shape (width + 1, outputs), with the intercept as the last row.
    """
    n, mean = gram[-1, -1], gram[:-1, -1] / gram[-1, -1]
    covariance = gram[:-1, :-1] / n - mean.outer(mean)
    variance = covariance.diagonal().clone()
    scale = torch.where(variance > 1e-12 * (mean**2 + 1), variance.sqrt(), 1.0)
    right = (targets[:-1] - mean.outer(targets[-1])) / scale[:, None]
    weight = ridge_weight(n * covariance / scale.outer(scale), right, ridge) / scale[:, None]
    return torch.cat([weight, targets[-1:] / n - mean @ weight])
