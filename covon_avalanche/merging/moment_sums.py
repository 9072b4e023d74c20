"""Sums of products of a layer's inputs, of linear layers and of the patches of convolutions.

``second_moments`` adds them up batch by batch, in the shape (groups, d + 1, d + 1): of d inputs
and, as the last, the constant 1. Only their upper halves are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def _add_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
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
        _add_product(total[:, i:j, i:d], rows[..., i:j], rows[..., i:])
    total[:, :d, d] += _row_sum(rows)
    total[:, d, d] += count


def _row_sum(rows: Tensor) -> Tensor:
    """``rows.sum(1)`` as a product, which is faster."""
    return rows.mT @ rows.new_ones(rows.shape[1])


def is_pointwise(layer: nn.Conv2d) -> bool:
    """Whether a convolution is a linear layer at each position."""
    one = layer.kernel_size == layer.stride == (1, 1)
    return one and layer.groups == 1 and not any(layer._reversed_padding_repeated_twice)


def add_patches(total: Tensor, layer: nn.Conv2d, x: Tensor) -> None:
    """Add the patches of a batch to a convolution's sums, where entries are ordered by row, column,
    channel.

    Convolutions of stride 1 are unfolded along the width only: with taps ``a`` and ``b`` along the
    height, the products at ``(a + 1, b + 1)`` are those at ``(a, b)`` less the first row of
    positions and with another one after the last.

    :param x: input of the layer, of shape (batch, channels, height, width).
    """
    padded = _padded(layer, x)
    groups, height, n, width, channels = padded.shape
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    length = (height - dh * (kh - 1) - 1) // sh + 1
    columns = (width - dw * (kw - 1) - 1) // sw + 1
    g, r, i, c, _ = padded.stride()
    if sh == 1 and kh > 1:
        windows = padded.as_strided(
            (groups, height, n, columns, kw, channels), (g, r, i, sw * c, dw * c, 1)
        )
        rows = windows.reshape(groups, height, n * columns, kw * channels)
        _add_sliding(total, rows, kh, dh, length)
    else:
        patches = padded.as_strided(
            (groups, length, n, columns, kh, kw, channels),
            (g, sh * r, i, sw * c, dh * r, dw * c, 1),
        )
        add_rows(total, patches.reshape(groups, length * n * columns, kh * kw * channels))


def in_order_of_weight(total: Tensor, layer: nn.Conv2d) -> Tensor:
    """The sums in the order of the layer's weight: channel, row, column."""
    channels = layer.in_channels // layer.groups
    index = torch.arange(channels * math.prod(layer.kernel_size) + 1, device=total.device)
    weight = index[:-1].view(*layer.kernel_size, channels).permute(2, 0, 1)
    order = torch.cat([weight.flatten(), index[-1:]])
    return total[:, order[:, None], order]


def _padded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The padded input, of shape (groups, height, n, width, channels): rows of pixels come first,
    so that consecutive rows of all images are one matrix."""
    groups, channels = layer.groups, x.shape[1] // layer.groups
    left, right, top, bottom = layer._reversed_padding_repeated_twice
    if layer.padding_mode != "zeros":
        x = F.pad(x, (left, right, top, bottom), mode=layer.padding_mode)
        left = right = top = bottom = 0
    height, width = x.shape[2] + top + bottom, x.shape[3] + left + right
    padded = x.new_zeros(groups, height, len(x), width, channels)
    inside = padded[:, top : height - bottom, :, left : width - right]
    inside.copy_(x.unflatten(1, (groups, channels)).permute(1, 3, 0, 4, 2))
    return padded


def _add_sliding(total: Tensor, rows: Tensor, taps: int, dilation: int, length: int) -> None:
    """Add the products of ``rows[i + dilation * a]`` and ``rows[i + dilation * b]`` over
    ``i < length``, for taps ``a <= b``.

    :param rows: of shape (groups, height, positions, d).
    """
    _, _, positions, d = rows.shape

    def part(start: int, count: int) -> Tensor:
        return rows[:, start : start + count].flatten(1, 2)

    for apart in range(taps):
        offset = dilation * apart
        found = rows.new_zeros(len(rows), d, d)
        _add_product(found, part(0, length), part(offset, length))
        for a in range(taps - apart):
            b = a + apart
            total[:, a * d : (a + 1) * d, b * d : (b + 1) * d] += found
            if b + 1 < taps:
                for start, factor in ((dilation * a, -1.0), (dilation * a + length, 1.0)):
                    first, second = part(start, dilation), part(start + offset, dilation)
                    _add_product(found, first, second, factor)
    found = _row_sum(part(0, length))
    for a in range(taps):
        total[:, a * d : (a + 1) * d, -1] += found
        start = dilation * a
        if a + 1 < taps:
            found += _row_sum(part(start + length, dilation)) - _row_sum(part(start, dilation))
    total[:, -1, -1] += length * positions
