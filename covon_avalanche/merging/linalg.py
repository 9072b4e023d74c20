"""Linear algebra that merge rules share."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-4
"""Fraction of the mean diagonal, added to second moments before they are inverted. With less,
weights grow from merge to merge in directions with little variance, in layers with many inputs and
few examples (``docs/merging.md``)."""


def mean_diagonals(matrices: Tensor) -> Tensor:
    """Mean diagonals of matrices of shape (groups, d, d), in the shape (groups, 1, 1)."""
    return matrices.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]


def with_ridge(matrices: Tensor, ridge: float | None = None) -> Tensor:
    """Positive semidefinite matrices of shape (groups, d, d), made invertible.

    :param ridge: of the mean diagonal, by default :data:`RIDGE`; at least the rounding error of
        sums in float32.
    """
    rounding = matrices.shape[-1] * torch.finfo(torch.float32).eps
    ridge = max(RIDGE if ridge is None else ridge, rounding)
    size = mean_diagonals(matrices).clamp(min=torch.finfo(matrices.dtype).tiny)
    return matrices + ridge * size * matrices.new_ones(matrices.shape[-1]).diag()
