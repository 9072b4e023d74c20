"""The last layer of a network, a new one in its place, and those beside it taken away."""

from __future__ import annotations

from torch import nn


def outputs(layer: nn.Module) -> int | None:
    """How many a layer has, if it can be a head."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return layer.out_channels if isinstance(layer, nn.Conv2d) else None


#: Beginnings of the names of what GoogLeNet and Inception have for training alone.
AUXILIARY = ("aux1", "aux2", "AuxLogits")


def without_auxiliary(model: nn.Module) -> nn.Module:
    """The network with one output in training, too: without the classifiers halfway up."""
    if hasattr(model, "aux_logits"):
        setattr(model, "aux_logits", False)  # noqa: B010 (no tensor, no module)
        for name in AUXILIARY:
            if hasattr(model, name):
                setattr(model, name, None)
    return model


def replace_head(model: nn.Module, head: str, num_classes: int) -> None:
    """Put a new layer with ``num_classes`` outputs at the place named ``head``."""
    old = model.get_submodule(head)
    new: nn.Module
    if isinstance(old, nn.Linear):
        new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
    elif isinstance(old, nn.Conv2d):  # SqueezeNet's
        new = nn.Conv2d(old.in_channels, num_classes, old.kernel_size)  # type: ignore[arg-type]
        nn.init.normal_(new.weight, std=0.01)
        nn.init.zeros_(new.bias)  # type: ignore[arg-type]
    else:
        raise ValueError(f"the last layer {head!r} is a {type(old).__name__}, which is unknown")
    parent, _, key = head.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, key, new)
    if hasattr(model, "num_classes"):
        setattr(model, "num_classes", num_classes)  # noqa: B010 (no tensor, no module)
