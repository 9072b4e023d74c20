"""Sums of products of a layer's inputs, of linear layers and of the patches of convolutions.

``second_moments`` adds them up batch by batch, in the shape (groups, d + 1, d + 1): of d inputs
and, as the last, the constant 1. Only their upper halves are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_IMAGES = 8  # whose patches are in memory at a time
_BLOCK = 256  # columns of a block of a symmetric product, of which the upper half is computed


@contextmanager
def exact_products(x: Tensor, groups: int = 1) -> Iterator[Tensor]:
    """The values that a layer computes with, as float32; their products are exact inside.

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


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += aᵀ b`` by groups; one group as matrices, which is faster."""
    if len(total) == 1:
        total[0].addmm_(a[0].mT, b[0])
    else:
        total.baddbmm_(a.mT, b)


def add_rows(total: Tensor, rows: Tensor) -> None:
    """Add the inputs of single outputs, of shape (groups, rows, d), to a layer's sums."""
    _, count, d = rows.shape
    width = d if d < 2 * _BLOCK else _BLOCK
    for i in range(0, d, width):
        j = min(i + width, d)
        _add_product(total[:, i:j, i:d], rows[..., i:j], rows[..., i:])
    total[:, :d, d] += rows.mT @ rows.new_ones(count)  # their sum as a product, which is faster
    total[:, d, d] += count


def is_pointwise(layer: nn.Conv2d) -> bool:
    """Whether a convolution is a linear layer at each position."""
    one = layer.kernel_size == layer.stride == (1, 1)
    return one and layer.groups == 1 and not any(layer._reversed_padding_repeated_twice)


def add_patches(total: Tensor, layer: nn.Conv2d, x: Tensor) -> None:
    """Add the patches of a batch to a convolution's sums, some images at a time.

    :param x: input of the layer, of shape (batch, channels, height, width).
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    for some in F.pad(x, layer._reversed_padding_repeated_twice, mode=mode).split(_IMAGES):
        patches = F.unfold(some, layer.kernel_size, layer.dilation, 0, layer.stride)
        rows = patches.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2)
        add_rows(total, rows.reshape(layer.groups, -1, rows.shape[-1]))
