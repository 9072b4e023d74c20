"""Sums of products of a layer's inputs, which ``second_moments`` adds up batch by batch.

A layer's sums have the shape (groups, d + 1, d + 1): of its d inputs and, as the last, the constant
1. Only their upper halves are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_BLOCK = 256  # columns of a block of a symmetric product, of which the upper half is computed


@contextmanager
def exact_products(x: Tensor, groups: int = 1) -> Iterator[Tensor]:
    """The values that a layer computes with, as float32, and products of them that lose nothing.

    Products of bfloat16 values are exact in float32, so that CPUs may use their bfloat16 units
    (which are slow for batches of small matrices).
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    backend: Any = getattr(torch.backends.mkldnn, "matmul", None)  # since torch 2.9
    with torch.autocast(device, enabled=False):
        if backend is None or x.dtype is not torch.bfloat16 or groups > 1:
            yield x.float()
            return
        before, backend.fp32_precision = backend.fp32_precision, "bf16"
        try:
            yield x.float()
        finally:
            backend.fp32_precision = before


def add_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
    """``total += factor * aᵀ b`` by groups; one group as matrices, which is faster."""
    if len(total) == 1:
        total[0].addmm_(a[0].mT, b[0], alpha=factor)
    else:
        total.baddbmm_(a.mT, b, alpha=factor)


def add_rows(total: Tensor, rows: Tensor) -> None:
    """Add the inputs of single outputs, of shape (groups, rows, d), to a layer's sums."""
    _, count, d = rows.shape
    width = d if d < 2 * _BLOCK else _BLOCK
    for i in range(0, d, width):
        j = min(i + width, d)
        add_product(total[:, i:j, i:d], rows[..., i:j], rows[..., i:])
    total[:, :d, d] += row_sum(rows)
    total[:, d, d] += count


def row_sum(rows: Tensor) -> Tensor:
    """Faster than ``sum(1)``."""
    return rows.mT @ rows.new_ones(rows.shape[1])
