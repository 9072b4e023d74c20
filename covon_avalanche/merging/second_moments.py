"""Second moments of the inputs of Linear, Conv2d and MultiheadAttention layers, for RegMean."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from covon_avalanche.merging.layers import layer_names, own_parameters
from covon_avalanche.merging.moment_sums import (
    add_patches,
    add_rows,
    exact_products,
    is_pointwise,
)
from covon_avalanche.merging.rule import Batch
from covon_avalanche.module_hooks import module_hooks
from covon_avalanche.posterior.fisher import in_mode


def input_second_moments(model: nn.Module, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """``sum x xᵀ`` over a layer's inputs: over examples, and tokens or positions of a convolution.

    In eval mode, and at the precision of ``torch.autocast`` where it is on: then the inputs are
    those that the layer computes with, rounded to bfloat16, and their products are summed in
    float32. Only layers that are called as modules, and of a subclass only those that compute what
    Linear or Conv2d do, take part; see
    :func:`~covon_avalanche.merging.layers.merged_layers`. Those of tied layers add up.

    :param batches: ``(input, target, *more)``, for ``model(input, *more)``.
    :return: by layer name, of shape (groups, d, d), in units of the input squared; ``d`` is the
        number of inputs of an output, with the constant 1 of a bias as the last. Groups are those
        of a convolution, or the query, key and value of attention.
    """
    sums: dict[str, Tensor] = {}  # see moment_sums
    names = layer_names(model)
    called = {
        layer
        for layer in model.modules()
        if layer in names or (isinstance(layer, nn.MultiheadAttention) and layer.out_proj in names)
    }

    def total(layer: nn.Module, groups: int, d: int, like: Tensor) -> Tensor:
        """The layer's sums; zeros at first."""
        if names[layer] not in sums:
            sums[names[layer]] = like.new_zeros(groups, d + 1, d + 1)
        return sums[names[layer]]

    def add_linear(layer: nn.Module, inputs: Sequence[Tensor]) -> None:
        """Add the inputs of a linear layer, or of the query, key and value, of shape (..., d)."""
        for group, x in enumerate(inputs):
            with exact_products(x.reshape(1, -1, x.shape[-1])) as rows:
                own = total(layer, len(inputs), x.shape[-1], rows)
                add_rows(own[group : group + 1], rows)

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(layer, nn.MultiheadAttention):
            inputs, outputs = _attention_inputs(layer, args, kwargs)
            if layer in names:
                add_linear(layer, inputs)
            if layer.out_proj in names:
                add_linear(layer.out_proj, [outputs])
            return
        if not _computes_as_its_base(layer, args, kwargs):
            return
        x = next(iter((*args, *kwargs.values())))
        if isinstance(layer, nn.Conv2d) and not is_pointwise(layer):
            with exact_products(x, layer.groups) as exact:
                own = total(layer, layer.groups, layer.weight[0].numel(), exact)
                add_patches(own, layer, exact)
        else:
            add_linear(layer, [x.permute(0, 2, 3, 1) if isinstance(layer, nn.Conv2d) else x])

    with module_hooks() as hooks, in_mode(model, train=False), torch.no_grad():
        for layer in called:
            hooks.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
        for x, _, *more in batches:
            model(x, *more)
    layers = {name: layer for layer, name in names.items()}
    return {name: _finished(found, layers[name]) for name, found in sums.items()}


def _computes_as_its_base(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the outputs of a layer with a forward pass of its own are those of Linear or Conv2d:
    timm's Conv2dSame pads its input, others standardise their weights."""
    base: Any = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d
    if type(layer).forward is base.forward or not isinstance(layer, base):
        return True
    own = layer.forward(*args, **kwargs)
    with suppress(RuntimeError):  # the unpadded input may be smaller than the kernel
        plain = base.forward(layer, next(iter((*args, *kwargs.values()))))
        same = isinstance(own, Tensor) and own.shape == plain.shape
        return same and torch.allclose(own, plain, rtol=1e-2, atol=1e-3)
    return False


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
    identity = {"out_proj.weight": weight.new_ones(len(weight)).diag()}
    if layer.out_proj.bias is not None:
        identity["out_proj.bias"] = torch.zeros_like(layer.out_proj.bias)
    return inputs, functional_call(bare, identity, args, kwargs)[0]


def _finished(total: Tensor, layer: nn.Module) -> Tensor:
    """Symmetric, in the order of the layer's weight and bias."""
    total.triu_().add_(total.triu(1).mT)
    return total if len(own_parameters(layer)) == 2 else total[:, :-1, :-1].clone()
