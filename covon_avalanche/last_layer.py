"""The last layer of a network, usually its classifier: its name, and the features it receives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from covon_avalanche.module_hooks import module_hooks

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def last_layer(network: nn.Module) -> str:
    """The name of the linear or convolutional layer that is defined last.

    :raises ValueError: if the network has no such layer, or no classifier: others with parameters
        are defined after it, or timm has created it without one.
    """
    kind = type(network).__name__
    modules = network.named_modules(remove_duplicate=False)
    layers = [name for name, module in modules if isinstance(module, _KINDS)]
    if not layers:
        raise ValueError(f"{kind} has no linear or convolutional layer")
    last = layers[-1]
    parameters = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    final = parameters[-1] if parameters else "none"
    of_timm = getattr(network, "get_classifier", None)
    removed = of_timm is not None and isinstance(of_timm(), nn.Identity)
    if removed or not final.startswith(f"{last}." if last else ""):
        raise ValueError(
            f"{kind} has no classifier (num_classes=0, or a head that was removed?), or it is not "
            f"defined last: the last linear or convolutional layer is {last!r}, the last parameter "
            f"{final!r}"
        )
    return last


def classifier(network: nn.Module) -> nn.Linear | nn.Conv1d | nn.Conv2d:
    """The last layer, if it maps features linearly to logits: linear, or with kernel size 1.

    :raises ValueError: if it is none, naming it.
    """
    name = last_layer(network)
    layer: Any = network.get_submodule(name)
    width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    if layer.weight[0].numel() != width:
        raise ValueError(
            f"the last layer of {type(network).__name__}, {name!r}, must be linear or have "
            f"kernel size 1 and one group, got a weight of shape {list(layer.weight.shape)}"
        )
    return layer


def pooled(x: Tensor) -> Tensor:
    """Features of shape (batch, width); maps of shape (batch, width, ...) are averaged over
    positions."""
    return x.flatten(2).mean(2) if x.dim() > 2 else x


@contextmanager
def penultimate_features(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, each forward pass of the model appends the input of its last layer.

    The last layer is the linear or convolutional one that is defined last. Features have shape
    (batch, width) and no gradient; those of a convolution are averaged over positions.

    :raises ValueError: if the model has no such layer.
    """
    layer = model.get_submodule(last_layer(model))
    features: list[Tensor] = []

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(iter((*args, *kwargs.values()))).detach().float()
        features.append(x if isinstance(layer, nn.Linear) else pooled(x))

    with module_hooks() as hooks:
        hooks.enter_context(layer.register_forward_pre_hook(keep, with_kwargs=True))
        yield features
