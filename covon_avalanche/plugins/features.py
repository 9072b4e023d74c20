"""The features that a network's last layer classifies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def penultimate_features(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, each forward pass of the model appends the input of its last layer.

    The last layer is the linear or convolutional one that is defined last. Features have shape
    (batch, width) and no gradient; those of a convolution are averaged over positions.

    :raises ValueError: if the model has no such layer.
    """
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear or convolutional layer")
    features: list[Tensor] = []

    def keep(layer: nn.Module, inputs: Any) -> None:
        x = inputs[0].detach().float()
        features.append(x if isinstance(layer, nn.Linear) else x.flatten(2).mean(2))

    handle = layers[-1].register_forward_pre_hook(keep)
    try:
        yield features
    finally:
        handle.remove()
