"""Memory layouts: a parameter's state follows its dtype, device and strides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from covon_avalanche.optim.noise import is_dense


def match_layout(value: Tensor, p: Tensor, name: str, what: str) -> Tensor:
    """The tensor itself, or a copy with the dtype, device and strides of a parameter.

    :param name: of the parameter, for the error.
    :param what: the tensor is, for the error.
    :raises ValueError: if the shapes differ.
    """
    if _layout(value) == _layout(p):
        return value
    if value.shape != p.shape:
        raise ValueError(
            f"{what} of {name!r} must have the parameter's shape {tuple(p.shape)}, "
            f"got {tuple(value.shape)}"
        )
    same_kind = value.dtype == p.dtype and value.device == p.device
    if same_kind and not is_dense(p):  # never worked on in order of memory
        return value
    with torch.inference_mode(False):  # as in SampleBuffer
        return torch.empty_like(p, requires_grad=False).copy_(value)


def align_state_(state: dict[str, Any], p: Tensor, name: str) -> None:
    """Give a parameter's state its layout, after the model was cast or moved, or changed its memory
    format.

    :raises ValueError: naming parameter and entry, if one has another shape.
    """
    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = match_layout(value, p, name, key)


class SampleBuffer:
    """Memory of a parameter's size that can swap contents with it.

    A parameter that has its memory to itself swaps it for that of the buffer, which costs nothing.
    One that shares it (with a flattened model, with other processes, a tensor subclass) is
    overwritten in place.
    """

    def __init__(self, p: Tensor) -> None:
        with torch.inference_mode(False):  # a prediction may need it first, and training next
            self.content = torch.empty_like(p, requires_grad=False)
        self._layout = _layout(p)
        plain = type(p) in (Tensor, torch.nn.Parameter)
        self._owns_memory = plain and _owns_memory(p)
        self.is_dense = plain and is_dense(p)
        """Whether the parameter has memory of its own without gaps, for code that takes
        addresses."""

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has the layout that the parameter had."""
        return self._layout == _layout(tensor)

    def swap_(self, p: Tensor) -> None:
        """Exchange the contents of buffer and parameter, which must not require gradients now."""
        if self._owns_memory:
            former = p.data
            p.data = self.content
            self.content = former
        else:
            former = p.detach().clone()
            p.copy_(self.content)
            self.content.copy_(former)


def _layout(p: Tensor) -> tuple[object, ...]:
    return p.device, p.dtype, p.shape, p.stride()


def _owns_memory(p: Tensor) -> bool:
    whole = p.untyped_storage().nbytes() == p.numel() * p.element_size()
    return whole and not p.is_shared()


def bump_versions(parameters: Iterable[Tensor]) -> None:
    """Tell autograd that contents have changed, so that a backward pass through the old ones is
    an error instead of a wrong gradient, and autocast, which caches casts of weights."""
    torch.clear_autocast_cache()
    torch.autograd.graph.increment_version(list(parameters))
