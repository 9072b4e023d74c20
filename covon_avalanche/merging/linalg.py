"""Linear algebra that merge rules share."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-6  # of the mean diagonal: directions without any input keep the old weights


def in_double(tensor: Tensor) -> Tensor:
    """Convert to float64, on the CPU instead of Apple's GPUs, which do not support it."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def mean_diagonals(matrices: Tensor) -> Tensor:
    """Mean diagonals of matrices of shape (groups, d, d), in the shape (groups, 1, 1)."""
    return matrices.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]


def with_ridge(matrices: Tensor, ridge: float = RIDGE) -> Tensor:
    """Positive semidefinite matrices of shape (groups, d, d), made invertible.

    :param ridge: of the mean diagonal.
    """
    size = mean_diagonals(matrices).clamp(min=torch.finfo(matrices.dtype).tiny)
    return matrices + ridge * size * matrices.new_ones(matrices.shape[-1]).diag()
