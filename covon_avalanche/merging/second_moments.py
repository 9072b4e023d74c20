"""Second moments of the inputs of Linear, Conv2d and MultiheadAttention layers, for RegMean."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from covon_avalanche.merging.rule import Batch
from covon_avalanche.posterior.fisher import in_mode

Reduction = Literal["sum", "mean"]

_BLOCK = 256  # columns of a block of a symmetric product, of which the upper half is computed


@torch.no_grad()
def input_second_moments(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    reduction: Reduction = "sum",
    weights: Mapping[str, Tensor] = MappingProxyType({}),
    only: str | None = None,
) -> dict[str, Tensor]:
    """``sum x xᵀ`` over a layer's inputs: over examples, and tokens or positions of a convolution.

    In eval mode, and at the precision of ``torch.autocast`` where it is on: then the inputs are
    those that the layer computes with, rounded to bfloat16, and their products are summed in
    float32. Only layers that are called as modules take part; see :func:`merged_layers`.

    Convolutions of stride 1 are unfolded along the width only: with taps ``a`` and ``b`` along the
    height, the products at ``(a + 1, b + 1)`` are those at ``(a, b)`` less the first row of
    positions and with another one after the last.

    :param batches: ``(input, target, *more)``, for ``model(input, *more)``.
    :param reduction: ``"mean"`` divides by the number of examples times positions.
    :param weights: parameters to use instead of the model's, by name.
    :param only: name of the only layer to measure; by default all.
    :return: by layer name, of shape (groups, d, d), in units of the input squared; ``d`` is the
        number of inputs of an output, with the constant 1 of a bias as the last. Groups are those
        of a convolution, or the query, key and value of attention.
    """
    sums: dict[str, Tensor] = {}  # upper halves, with the constant 1
    names = {layer: n for n, layer in merged_layers(model).items() if only in (None, n)}
    called = {
        layer
        for layer in model.modules()
        if layer in names or getattr(layer, "out_proj", None) in names  # see _attention_inputs
    }

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(layer, nn.MultiheadAttention):
            inputs, outputs = _attention_inputs(layer, args, kwargs)
            if layer in names:
                _add_linear(sums, names[layer], inputs)
            if layer.out_proj in names:
                _add_linear(sums, names[layer.out_proj], [outputs])
            return
        x = next(iter((*args, *kwargs.values())))
        if isinstance(layer, nn.Conv2d) and not _is_pointwise(layer):
            with _exact_products(x, layer.groups) as exact:
                _add_patches(sums, names[layer], layer, exact)
        else:
            inputs = x.permute(0, 2, 3, 1) if isinstance(layer, nn.Conv2d) else x
            _add_linear(sums, names[layer], [inputs])

    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in called]
    try:
        with in_mode(model, train=False), torch.no_grad(), _values_of(model, weights):
            for x, _, *more in batches:
                model(x, *more)
    finally:
        for handle in handles:
            handle.remove()
    layers = {name: layer for layer, name in names.items()}
    return {name: _finished(total, layers[name], reduction) for name, total in sums.items()}


@contextmanager
def _values_of(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other values of some parameters. ``functional_call`` would not restore a
    module that it finds by two names."""
    before = {name: model.get_parameter(name).detach().clone() for name in weights}
    try:
        for name, value in weights.items():
            model.get_parameter(name).copy_(value)
        yield
    finally:
        for name, value in before.items():
            model.get_parameter(name).copy_(value)


def merged_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that RegMean merges, by name: Linear, Conv2d, MultiheadAttention (its input
    projection) and the Conv1D of transformers' GPT-2, whose weight is a parameter that is not
    frozen.

    Not merged are convolutions in one or three dimensions and transposed ones, attention whose
    keys or values have another width than its queries, recurrent layers, embeddings, and the
    parameters of normalisation layers.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if (
            isinstance(module, nn.Linear | nn.Conv2d | nn.MultiheadAttention)
            or is_transposed_linear(module)
        )
        and (parameters := own_parameters(module))
        and parameters[0].requires_grad
    }


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a linear layer with a weight of shape (inputs,
    outputs)."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return name == "transformers.pytorch_utils.Conv1D"


def own_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Weight and, if there is one, bias of a layer; empty if the weight is no parameter."""
    known = dict(layer.named_parameters(recurse=False))
    prefix = "in_proj_" if isinstance(layer, nn.MultiheadAttention) else ""
    found = [known.get(prefix + name) for name in ("weight", "bias")]
    return [p for p in found if p is not None] if found[0] is not None else []


def _finished(total: Tensor, layer: nn.Module, reduction: Reduction) -> Tensor:
    """Symmetric, in the order of the layer's weight and bias."""
    total.triu_().add_(total.triu(1).mT)
    if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
        order = _order_of_weight(layer, total.device)
        total = total[:, order[:, None], order]
    if reduction == "mean":
        total = total / total[:, -1:, -1:]
    return total if len(own_parameters(layer)) == 2 else total[:, :-1, :-1].clone()


# Products ------------------------------------------------------------------------------


@contextmanager
def _exact_products(x: Tensor, groups: int = 1) -> Iterator[Tensor]:
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


def _add_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
    """``total += factor * aᵀ b`` by groups; one group as matrices, which is faster."""
    if len(total) == 1:
        total[0].addmm_(a[0].mT, b[0], alpha=factor)
    else:
        total.baddbmm_(a.mT, b, alpha=factor)


def _add_linear(sums: dict[str, Tensor], name: str, inputs: Sequence[Tensor]) -> None:
    """Add the inputs of a linear layer, or of the query, key and value, of shape (..., d)."""
    for group, x in enumerate(inputs):
        with _exact_products(x.reshape(1, -1, x.shape[-1])) as rows:
            total = _total(sums, name, len(inputs), x.shape[-1], rows)
            _add_rows(total[group : group + 1], rows)


def _add_rows(total: Tensor, rows: Tensor) -> None:
    """Add the inputs of single outputs, of shape (groups, rows, d), to a layer's sums."""
    _, count, d = rows.shape
    width = d if d < 2 * _BLOCK else _BLOCK
    for i in range(0, d, width):
        j = min(i + width, d)
        _add_product(total[:, i:j, i:d], rows[..., i:j], rows[..., i:])
    total[:, :d, d] += _row_sum(rows)
    total[:, d, d] += count


def _row_sum(rows: Tensor) -> Tensor:
    """Faster than ``sum(1)``."""
    return rows.mT @ rows.new_ones(rows.shape[1])


def _total(sums: dict[str, Tensor], name: str, groups: int, d: int, like: Tensor) -> Tensor:
    """A layer's sums, the constant 1 included; zeros at first."""
    if name not in sums:
        sums[name] = like.new_zeros(groups, d + 1, d + 1)
    return sums[name]


# Convolutions --------------------------------------------------------------------------


def _is_pointwise(layer: nn.Conv2d) -> bool:
    """Whether a convolution is a linear layer at each position."""
    one = layer.kernel_size == layer.stride == (1, 1)
    return one and layer.groups == 1 and not any(layer._reversed_padding_repeated_twice)


def _add_patches(sums: dict[str, Tensor], name: str, layer: nn.Conv2d, x: Tensor) -> None:
    """Add the patches of a convolution; entries are ordered by row, column, channel."""
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
        _add_sliding(sums, name, rows, kh, dh, length)
    else:
        patches = padded.as_strided(
            (groups, length, n, columns, kh, kw, channels),
            (g, sh * r, i, sw * c, dh * r, dw * c, 1),
        )
        rows = patches.reshape(groups, length * n * columns, kh * kw * channels)
        _add_rows(_total(sums, name, groups, rows.shape[-1], rows), rows)


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


def _add_sliding(
    sums: dict[str, Tensor], name: str, rows: Tensor, taps: int, dilation: int, length: int
) -> None:
    """Add the products of ``rows[i + dilation * a]`` and ``rows[i + dilation * b]`` over
    ``i < length``, for taps ``a <= b``.

    :param rows: of shape (groups, height, positions, d).
    """
    groups, _, positions, d = rows.shape
    total = _total(sums, name, groups, taps * d, rows)

    def part(start: int, count: int) -> Tensor:
        return rows[:, start : start + count].flatten(1, 2)

    for apart in range(taps):
        offset = dilation * apart
        found = rows.new_zeros(groups, d, d)
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


def _order_of_weight(layer: nn.Conv2d, device: torch.device) -> Tensor:
    """Where the entries of a weight (channel, row, column) and the bias are in the sums."""
    channels = layer.in_channels // layer.groups
    index = torch.arange(channels * math.prod(layer.kernel_size) + 1, device=device)
    weight = index[:-1].view(*layer.kernel_size, channels).permute(2, 0, 1)
    return torch.cat([weight.flatten(), index[-1:]])


# Attention -----------------------------------------------------------------------------


def _attention_inputs(
    layer: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], Tensor]:
    """Query, key and value, or only one for self-attention, and the input of the output projection:
    the output of a copy whose output projection is the identity."""
    given = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
    inputs = [given[name] for name in ("query", "key", "value")]
    if inputs[0] is inputs[1] is inputs[2]:
        inputs = inputs[:1]
    bare = copy.copy(layer)
    bare._forward_pre_hooks = OrderedDict()
    weight = layer.out_proj.weight
    identity = {"out_proj.weight": torch.eye(len(weight)).to(weight)}
    if layer.out_proj.bias is not None:
        identity["out_proj.bias"] = torch.zeros_like(layer.out_proj.bias)
    return inputs, functional_call(bare, identity, args, kwargs)[0]
