"""The layers that RegMean merges, and the weights of each as one matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def merged_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that RegMean merges, by name: Linear, Conv2d, MultiheadAttention (its input
    projection) and the Conv1D of transformers' GPT-2, whose weight is a parameter that is not
    frozen.

    Not merged are convolutions in one or three dimensions and transposed ones, attention whose
    keys or values have another width than its queries, recurrent layers, embeddings, the
    parameters of normalisation layers, and layers that share only one of weight and bias.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if (
            isinstance(module, nn.Linear | nn.Conv2d | nn.MultiheadAttention)
            or _is_transposed_linear(module)
        )
        and (parameters := own_parameters(module))
        and parameters[0].requires_grad
    }
    own = {name: tuple(map(id, own_parameters(layer))) for name, layer in found.items()}
    users: dict[int, set[tuple[int, ...]]] = {}
    for layer_ids in own.values():
        for p in layer_ids:
            users.setdefault(p, set()).add(layer_ids)
    return {n: layer for n, layer in found.items() if all(len(users[p]) == 1 for p in own[n])}


def layer_names(model: nn.Module) -> dict[nn.Module, str]:
    """The names of :func:`merged_layers`, by layer; tied layers, which share weight and bias, have
    that of the first."""
    first: dict[tuple[int, ...], str] = {}
    return {
        layer: first.setdefault(tuple(map(id, own_parameters(layer))), name)
        for name, layer in merged_layers(model).items()
    }


def own_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Weight and, if there is one, bias of a layer; empty if the weight is no parameter."""
    known = dict(layer.named_parameters(recurse=False))
    prefix = "in_proj_" if isinstance(layer, nn.MultiheadAttention) else ""
    found = [known.get(prefix + name) for name in ("weight", "bias")]
    return [p for p in found if p is not None] if found[0] is not None else []


def as_rows(layer: nn.Module, values: Mapping[Tensor, Tensor] | None = None) -> Tensor:
    """Weight and bias of a layer as one matrix of shape (outputs, d), the bias as the last column.

    :param values: to use instead of the parameters'.
    """
    parts = [values[p] if values else p.detach() for p in own_parameters(layer)]
    rows = [_by_output(layer, part) for part in parts]
    return torch.cat([row.reshape(len(row), -1) for row in rows], 1)


def from_rows(layer: nn.Module, rows: Tensor) -> dict[Tensor, Tensor]:
    """The inverse of :func:`as_rows`: values by parameter, in their shapes."""
    weight, *bias = own_parameters(layer)
    d = rows.shape[1] - len(bias)
    values: dict[Tensor, Tensor] = {weight: _by_output(layer, rows[:, :d]).view_as(weight)}
    return values | dict.fromkeys(bias, rows[:, -1])


def _is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a linear layer with a weight of shape (inputs,
    outputs)."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return name == "transformers.pytorch_utils.Conv1D"


def _by_output(layer: nn.Module, parameter: Tensor) -> Tensor:
    """A layer's parameter with the outputs as its first dimension, and the inverse of that."""
    return parameter.t() if _is_transposed_linear(layer) else parameter
